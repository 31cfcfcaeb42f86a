// QK-clip behind a step: the largest logits of all ranks brought together, and the rows of weights that they ask for
// scaled.
#include "engine/train/trainer_processes.hpp"
#include "planner/model/model.hpp"

#include <algorithm>
#include <limits>

namespace moe::train {

// Every process has those of all ranks.
std::vector<std::vector<float>> Trainer::largest_logits(bool again) const {
    constexpr float unseen = -std::numeric_limits<float>::infinity();
    const model::Model& model = *plan_.model;
    const std::size_t layers = model.layers.size() + model.mtp.size();
    std::size_t width = 0;
    for (const model::LayerKind& kind : model.kinds)
        width = std::max(width, static_cast<std::size_t>(std::max(0, kind.attention.heads)));
    std::vector<float> flat(layers * width, unseen);
    const auto take = [&](const std::vector<float>& part, std::size_t at) {
        for (std::size_t i = 0; i < part.size(); ++i) flat[at + i] = std::max(flat[at + i], part[i]);
    };
    for (const Rank& rank : ranks_) {
        const std::vector<std::vector<float>>& seen = executor_of_step(rank, again).largest_logits();
        for (std::size_t layer = 0; layer < seen.size(); ++layer) take(seen[layer], layer * width);
    }
    if (transport() != nullptr) {
        for (const std::vector<float>& part : gathered(flat)) take(part, 0);
        among_processes([&](comm::Transport& t) {
            t.broadcast(0, {reinterpret_cast<char*>(flat.data()), flat.size() * sizeof(float)});
            return 0;
        });
    }
    std::vector<std::vector<float>> largest(layers);
    for (std::size_t layer = 0; layer < layers; ++layer) {
        const auto first = flat.begin() + static_cast<std::ptrdiff_t>(layer * width);
        largest[layer].assign(first, first + static_cast<std::ptrdiff_t>(width));
    }
    return largest;
}

// A bad step has changed no weight, and neither does this. Every rank scales what it holds, copies too.
LogitStep Trainer::clip_heads(bool skipped, bool again) {
    const std::vector<std::vector<float>> largest = largest_logits(again);
    LogitStep step{-std::numeric_limits<double>::infinity(), 0};
    for (const std::vector<float>& layer : largest)
        for (const float most : layer) step.largest = std::max(step.largest, static_cast<double>(most));
    if (skipped) return step;
    const Clipping clips = clipping(options_.qk_clip, *plan_.model, largest);
    step.clipped = clips.heads;
    if (clips.factors.empty()) return step;
    run_ranks([&](Rank& r, int) {
        std::vector<float> values;
        for (const weights::LocalParameter& p : r.parameters) {
            const auto factors = clips.factors.find(p.name);
            if (factors == clips.factors.end()) continue;
            const program::Bucket& bucket = program_of(r).buckets[static_cast<std::size_t>(p.bucket)];
            for (const weights::Piece& piece : p.pieces)
                for (std::int64_t at = 0, count = 0; at < piece.count; at += count) { // rows of one factor at a time
                    std::int64_t row = (piece.global + at) / p.cols;
                    const float factor = factors->second[static_cast<std::size_t>(row)];
                    do {
                        ++row;
                        count = std::min(piece.count - at, row * p.cols - (piece.global + at));
                    } while (at + count < piece.count && factors->second[static_cast<std::size_t>(row)] == factor);
                    if (factor == 1.0f) continue;
                    values.resize(static_cast<std::size_t>(count));
                    weights::load_state(program_of(r), bucket, *r.arena, weights::StateKind::weight, piece.shard + at,
                                        values.data(), count);
                    for (float& value : values) value *= factor;
                    weights::store_weights(program_of(r), bucket, *r.arena, piece.shard + at, values.data(), count);
                }
        }
    });
    return step;
}

} // namespace moe::train
