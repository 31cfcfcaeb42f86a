// Adds up what the chunks of each pipeline rank hold and finds the fullest rank.
#include "simulator/stage_memory.hpp"

#include "planner/library_memory.hpp"
#include "planner/schedule.hpp"

#include "planner/builder.hpp"

#include <algorithm>
#include <bit>
#include <numeric>

namespace moe {
namespace {

// How far a pair takes a pool above its state before: the forward takes segments of `bytes` from its first on, the
// backward beside it releases from its last on.
int rise(const SavedSegments& forward, const SavedSegments& backward, std::int64_t bytes) {
    int now = 0, most = 0;
    for (std::size_t i = 0; i < std::max(forward.size(), backward.size()); ++i) {
        if (i < forward.size() && forward[i] == bytes) most = std::max(most, ++now);
        if (i < backward.size() && backward[backward.size() - 1 - i] == bytes) --now;
    }
    return most;
}

} // namespace

void StageMemory::add_states(const Plan& plan, const BucketSize& bucket) {
    states += state_bytes(plan, bucket);
    ((plan.offload & offload::optimizer) != 0 ? visiting : states) += optimizer_bytes(plan, bucket);
}

std::map<std::int64_t, int> most_kept(const std::vector<const SavedSegments*>& chunks, const std::vector<Kept>& kept) {
    std::map<std::int64_t, std::vector<int>> pools; // bytes -> segments by chunk
    for (std::size_t c = 0; c < chunks.size(); ++c)
        for (const std::int64_t bytes : *chunks[c]) {
            std::vector<int>& counts = pools[bytes];
            counts.resize(chunks.size(), 0);
            ++counts[c];
        }
    std::map<std::int64_t, int> result;
    for (const auto& [bytes, counts] : pools) {
        int& most = result[bytes];
        for (const Kept& state : kept) {
            const int before =
                std::inner_product(state.micro_batches.begin(), state.micro_batches.end(), counts.begin(), 0);
            const int above = state.forward < 0 ? 0
                                                : rise(*chunks[static_cast<std::size_t>(state.forward)],
                                                       *chunks[static_cast<std::size_t>(state.backward)], bytes);
            most = std::max(most, before + above);
        }
    }
    return result;
}

int enough_micro_batches(const Plan& plan) {
    const int m = plan.micro_batches();
    return std::min(m, 4 * plan.pp + m % plan.pp);
}

double peak_bytes(const Plan& plan, const std::vector<StageMemory>& stages, const std::vector<int>& of_stage,
                  const std::vector<double>& saved) {
    const double inputs = 4.0 * static_cast<double>(plan.tokens_gathered()) *
                              (2.0 + static_cast<double>(plan.model->mtp.size())) * plan.micro_batches() +
                          4.0 * static_cast<double>(plan.seq / plan.cp);
    const std::uint64_t common =
        (plan.pp > 1 ? group_bit(groups::pipeline) : 0) | (plan.gpus > 1 ? group_bit(groups::world) : 0);
    double worst = 0.0;
    for (int r = 0; r < plan.pp; ++r) {
        double bytes = inputs, visiting = 0.0, activations = saved[static_cast<std::size_t>(r)];
        Workspace workspace;
        std::uint64_t used = common;
        for (int c = 0; c < plan.vpp; ++c) {
            const StageMemory& stage = stages[static_cast<std::size_t>(
                of_stage[static_cast<std::size_t>(stage_of(plan.schedule, plan.pp, r, c))])];
            bytes += stage.states;
            visiting += stage.visiting;
            activations -= stage.counted_twice;
            workspace.forward = std::max(workspace.forward, stage.workspace.forward);
            workspace.backward = std::max(workspace.backward, stage.workspace.backward);
            used |= stage.groups;
        }
        activations += static_cast<double>(plan.ep_overlap ? workspace.forward + workspace.backward
                                                           : std::max(workspace.forward, workspace.backward));
        bytes += std::max(activations, visiting) + library_memory(plan) +
                 plan.hardware->communicator_bytes * std::popcount(used);
        worst = std::max(worst, bytes);
    }
    // Ranks on CPUs share the memory of one machine.
    return plan.hardware->cpu ? worst * plan.gpus : worst;
}

} // namespace moe
