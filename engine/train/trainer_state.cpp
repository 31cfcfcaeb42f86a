// A trainer's weights, gradients and moments by their global names: read, set, copied for a checkpoint and restored.
#include "engine/train/trainer_processes.hpp"
#include "planner/base/error.hpp"
#include "planner/model/model.hpp"

#include <algorithm>

namespace moe::train {

namespace {

// The slices that a rank holds of each parameter, with room for its state.
std::vector<weights::Slice> slices_of(const std::vector<weights::LocalParameter>& parameters, bool averages) {
    std::vector<weights::Slice> slices;
    for (const weights::LocalParameter& p : parameters) {
        if (p.pieces.empty() || p.copy) continue;
        weights::Slice slice{p.name, p.rows, p.cols, {}, 0, {}, p.moments};
        for (const weights::Piece& piece : p.pieces) {
            weights::add_run(slice.runs, piece.global, piece.count);
            slice.elements += piece.count;
        }
        for (const weights::StateKind kind : weights::kinds_of(averages, p.moments))
            slice.values[static_cast<std::size_t>(kind)].resize(static_cast<std::size_t>(slice.elements));
        slices.push_back(std::move(slice));
    }
    return slices;
}

} // namespace

std::vector<float> Trainer::assemble(
    const std::string& name,
    const std::function<void(const Rank&, const program::Bucket&, const weights::Piece&, float* to)>& read) const {
    const auto shape = shapes_.find(name);
    if (shape == shapes_.end()) refuse("the model has no parameter '{}'", name);
    if (transport() != nullptr) fail("{}: only ranks of one process can be read as a whole", name);
    std::vector<float> values(static_cast<std::size_t>(shape->second.rows * shape->second.cols));
    for_each_piece(name, [&](const Rank& r, const program::Bucket& bucket, const weights::Piece& piece) {
        read(r, bucket, piece, values.data() + piece.global);
    });
    return values;
}

std::vector<float> Trainer::read_gradient(const std::string& name) const {
    return assemble(name, [&](const Rank& r, const program::Bucket& bucket, const weights::Piece& piece, float* to) {
        if (bucket.frozen) refuse("{}: is frozen by lora = {} and has no gradient", name, to_string(plan_.lora));
        r.device->read(to, r.arena->as<float>(bucket.gradient_shard) + piece.shard,
                       static_cast<std::size_t>(piece.count) * sizeof(float));
    });
}

std::vector<float> Trainer::read_weight(const std::string& name) const {
    return assemble(name, [&](const Rank& r, const program::Bucket& bucket, const weights::Piece& piece, float* to) {
        weights::load_state(program_of(r), bucket, *r.arena, weights::StateKind::weight, piece.shard, to, piece.count);
    });
}

std::vector<float> Trainer::read_average(const std::string& name) const {
    if (!ranks_.front().average.started()) return read_weight(name);
    std::vector<float> values(read_weight(name).size());
    for (const Rank& r : ranks_)
        for (const weights::LocalParameter& p : r.parameters)
            for (const weights::Piece& piece : p.pieces)
                if (p.name == name)
                    std::copy_n(r.average.of(static_cast<std::size_t>(p.bucket)) + piece.shard, piece.count,
                                values.data() + piece.global);
    return values;
}

void Trainer::write_weight(const std::string& name, std::span<const float> values) {
    const auto shape = shapes_.find(name);
    if (shape == shapes_.end()) refuse("the model has no parameter '{}'", name);
    if (static_cast<std::int64_t>(values.size()) != shape->second.rows * shape->second.cols)
        refuse("{} has {} x {} elements, {} were given", name, shape->second.rows, shape->second.cols, values.size());
    for_each_piece(name, [&](const Rank& r, const program::Bucket& bucket, const weights::Piece& piece) {
        weights::store_weights(program_of(r), bucket, *r.arena, piece.shard, values.data() + piece.global, piece.count);
    });
}

void Trainer::fill_weight(const std::string& name,
                          const std::function<void(std::int64_t first, std::span<float> out)>& read) {
    constexpr std::int64_t longest = 1 << 20;
    std::vector<float> values;
    for_each_piece(name, [&](const Rank& r, const program::Bucket& bucket, const weights::Piece& piece) {
        for (std::int64_t at = 0; at < piece.count; at += longest) {
            values.resize(static_cast<std::size_t>(std::min(longest, piece.count - at)));
            read(piece.global + at, values);
            weights::store_weights(program_of(r), bucket, *r.arena, piece.shard + at, values.data(),
                                   static_cast<std::int64_t>(values.size()));
        }
    });
}

void Trainer::snapshot(weights::Snapshot& out) const {
    out.state = {done_,
                 samples_,
                 options_.seed,
                 plan_.model->name,
                 plan_.model->config_json,
                 last_load_,
                 {},
                 bad_.norms(),
                 bad_.skipped(),
                 options_.rules.freeze,
                 options_.rules.group_texts(),
                 options_.ema,
                 plan_.optimizer.muon,
                 plan_.lora.on() ? plan::to_string(plan_.lora) : "",
                 scales_.entries()};
    out.world = plan_.gpus;
    out.ranks.resize(ranks_.size());
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
        const Rank& rank = ranks_[r];
        weights::RankSlices& slices = out.ranks[r];
        slices.rank = rank.rank;
        if (slices.slices.empty()) slices.slices = slices_of(rank.parameters, options_.ema > 0.0);
        std::size_t next = 0;
        for (const weights::LocalParameter& p : rank.parameters) {
            if (p.pieces.empty() || p.copy) continue;
            const program::Bucket& bucket = program_of(rank).buckets[static_cast<std::size_t>(p.bucket)];
            weights::Slice& slice = slices.slices[next++];
            for (const weights::StateKind kind : weights::kinds_of(options_.ema > 0.0, p.moments)) {
                float* to = slice.values[static_cast<std::size_t>(kind)].data();
                // Before the first step the average is the weight.
                const bool average = kind == weights::StateKind::average && rank.average.started();
                const weights::StateKind of = kind == weights::StateKind::average ? weights::StateKind::weight : kind;
                for (const weights::Piece& piece : p.pieces) {
                    if (average)
                        std::copy_n(rank.average.of(static_cast<std::size_t>(p.bucket)) + piece.shard, piece.count, to);
                    else
                        weights::load_state(program_of(rank), bucket, *rank.arena, of, piece.shard, to, piece.count);
                    to += piece.count;
                }
            }
        }
    }
}

void Trainer::restore(const weights::StoredCheckpoint& checkpoint) {
    const weights::RunState& state = checkpoint.state();
    for (const auto& [name, shape] : shapes_) {
        const auto found = checkpoint.shapes().find(name);
        if (found == checkpoint.shapes().end())
            refuse("{}: is of {} and holds no parameter {}", checkpoint.path(), state.model, name);
        if (found->second.rows != shape.rows || found->second.cols != shape.cols)
            refuse("{}: {} is {} x {}, the plan's model has {} x {}", checkpoint.path(), name, found->second.rows,
                   found->second.cols, shape.rows, shape.cols);
    }
    if (checkpoint.shapes().size() != shapes_.size())
        refuse("{}: is of {} and holds {} parameters, the plan's model has {}", checkpoint.path(), state.model,
               checkpoint.shapes().size(), shapes_.size());
    if (!options_.forward_only)
        for (const Rank& r : ranks_) weights::clear_blocks(program_of(r), *r.arena);
    std::vector<float> values;
    for (const auto& [name, shape] : shapes_)
        for_each_piece(name, [&, &name = name](const Rank& r, const program::Bucket& bucket,
                                               const weights::Piece& piece) {
            values.resize(static_cast<std::size_t>(piece.count));
            // Moments of another optimizer mean something else: they begin at zero.
            const bool other = checkpoint.shapes().at(name).moments != bucket.moments();
            for (const weights::StateKind kind : weights::kinds_of(false, bucket.moments())) {
                if (other && kind != weights::StateKind::weight)
                    std::fill(values.begin(), values.end(), 0.0f);
                else
                    checkpoint.read(name, kind, piece.global, values);
                weights::store_state(program_of(r), bucket, *r.arena, kind, piece.shard, values.data(), piece.count);
                if (options_.forward_only) break; // The weight is the first.
            }
        });
    if (options_.ema > 0.0) restore_average(checkpoint);
    done_ = begun_ = state.step;
    samples_ = state.samples;
    last_load_ = state.router_loads;
    scales_ = delays_scales() ? ScaleHistory(state.largest) : ScaleHistory();
    bad_ = BadSteps(state.norms, state.skipped);
}

// From the weights, where the checkpoint has no average.
void Trainer::restore_average(const weights::StoredCheckpoint& checkpoint) {
    for (Rank& r : ranks_) {
        r.average.start(program_of(r), *r.arena);
        for (const weights::LocalParameter& p : r.parameters)
            for (const weights::Piece& piece : p.pieces) {
                float* to = r.average.of(static_cast<std::size_t>(p.bucket)) + piece.shard;
                if (checkpoint.state().averages())
                    checkpoint.read(p.name, weights::StateKind::average, piece.global,
                                    {to, static_cast<std::size_t>(piece.count)});
            }
    }
}

void Trainer::go_back(const weights::StoredCheckpoint& checkpoint) {
    const std::int64_t samples = samples_, begun = begun_;
    restore(checkpoint);
    samples_ = samples;
    begun_ = std::min(begun, done_);
}

double Trainer::average_gib() const {
    std::int64_t most = 0;
    for (const Rank& rank : ranks_) {
        std::int64_t elements = 0;
        for (const program::Bucket& b : program_of(rank).buckets) elements += b.elements / b.group_size;
        most = std::max(most, elements);
    }
    return options_.ema > 0.0 ? 4.0 * static_cast<double>(most) / (1 << 30) : 0.0;
}

double Trainer::arena_gib() const { return static_cast<double>(arena_bytes_) / (1 << 30); }
double Trainer::memory_gib() const {
    double most = arena_gib();
    for (const Rank& rank : ranks_) most = std::max(most, rank.device->used_bytes() / (1 << 30));
    return most;
}

} // namespace moe::train
