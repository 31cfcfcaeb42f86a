// A trainer's weights, gradients and moments by their global names: read, set, copied for a checkpoint and restored.
#include "engine/train/trainer_processes.hpp"
#include "planner/base/error.hpp"
#include "planner/model/model.hpp"

#include <algorithm>

namespace moe::train {

namespace {

// The slices that a rank holds of each parameter, with room for its state.
std::vector<weights::Slice> slices_of(const std::vector<weights::LocalParameter>& parameters) {
    std::vector<weights::Slice> slices;
    for (const weights::LocalParameter& p : parameters) {
        if (p.pieces.empty() || p.copy) continue;
        weights::Slice slice{p.name, p.rows, p.cols, {}, 0, {}};
        for (const weights::Piece& piece : p.pieces) {
            weights::add_run(slice.runs, piece.global, piece.count);
            slice.elements += piece.count;
        }
        for (std::vector<float>& values : slice.values) values.resize(static_cast<std::size_t>(slice.elements));
        slices.push_back(std::move(slice));
    }
    return slices;
}

} // namespace

std::vector<float> Trainer::assemble(const std::string& name,
                                     program::TensorId (*tensor)(const program::Bucket&)) const {
    const auto shape = shapes_.find(name);
    if (shape == shapes_.end()) refuse("the model has no parameter '{}'", name);
    if (transport() != nullptr) fail("{}: only ranks of one process can be read as a whole", name);
    std::vector<float> values(static_cast<std::size_t>(shape->second.rows * shape->second.cols));
    for_each_piece(name, [&](const Rank& r, const program::Bucket& bucket, const weights::Piece& piece) {
        r.device->read(values.data() + piece.global, r.arena->as<float>(tensor(bucket)) + piece.shard,
                       static_cast<std::size_t>(piece.count) * sizeof(float));
    });
    return values;
}

std::vector<float> Trainer::read_gradient(const std::string& name) const {
    return assemble(name, [](const program::Bucket& bucket) { return bucket.gradient_shard; });
}

std::vector<float> Trainer::read_weight(const std::string& name) const {
    return assemble(name, [](const program::Bucket& bucket) { return bucket.kept_master(); });
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
    out.state = {done_, samples_,     options_.seed,  plan_.model->name,     plan_.model->config_json,    last_load_,
                 {},    bad_.norms(), bad_.skipped(), options_.rules.freeze, options_.rules.group_texts()};
    out.world = plan_.gpus;
    out.ranks.resize(ranks_.size());
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
        const Rank& rank = ranks_[r];
        weights::RankSlices& slices = out.ranks[r];
        slices.rank = rank.rank;
        if (slices.slices.empty()) slices.slices = slices_of(rank.parameters);
        std::size_t next = 0;
        for (const weights::LocalParameter& p : rank.parameters) {
            if (p.pieces.empty() || p.copy) continue;
            const program::Bucket& bucket = program_of(rank).buckets[static_cast<std::size_t>(p.bucket)];
            weights::Slice& slice = slices.slices[next++];
            for (int kind = 0; kind < weights::state_kind_count; ++kind) {
                float* to = slice.values[static_cast<std::size_t>(kind)].data();
                for (const weights::Piece& piece : p.pieces) {
                    weights::load_state(program_of(rank), bucket, *rank.arena, static_cast<weights::StateKind>(kind),
                                        piece.shard, to, piece.count);
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
    std::vector<float> values;
    for (const auto& [name, shape] : shapes_)
        for_each_piece(
            name, [&, &name = name](const Rank& r, const program::Bucket& bucket, const weights::Piece& piece) {
                values.resize(static_cast<std::size_t>(piece.count));
                const int kinds = options_.forward_only ? 1 : weights::state_kind_count; // The weight is the first.
                for (int kind = 0; kind < kinds; ++kind) {
                    checkpoint.read(name, static_cast<weights::StateKind>(kind), piece.global, values);
                    weights::store_state(program_of(r), bucket, *r.arena, static_cast<weights::StateKind>(kind),
                                         piece.shard, values.data(), piece.count);
                }
            });
    done_ = begun_ = state.step;
    samples_ = state.samples;
    last_load_ = state.router_loads;
    bad_ = BadSteps(state.norms, state.skipped);
}

void Trainer::go_back(const weights::StoredCheckpoint& checkpoint) {
    const std::int64_t samples = samples_, begun = begun_;
    restore(checkpoint);
    samples_ = samples;
    begun_ = std::min(begun, done_);
}

} // namespace moe::train
