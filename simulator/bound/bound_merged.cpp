// Quotes of plans with EP overlap from the merged pair that they have most of, played op by op.
#include "simulator/bound/bound_model.hpp"
#include "simulator/estimate/step_parts.hpp"

#include <algorithm>

namespace moe {
namespace {

using Pair = std::pair<int, int>; // distinct stages, of the forward and of the backward

// What the slots of a rank are, for a number of micro-batches.
struct Turns {
    std::map<Pair, double> merged;
    std::vector<double> alone[2]; // forwards and backwards by distinct stage

    Turns(const std::vector<Turn>& turns, const Shape& shape, const Plan& plan, int rank) {
        for (std::vector<double>& counts : alone) counts.assign(shape.distinct.size(), 0.0);
        const auto distinct = [&](const Turn& turn) {
            return shape.of_stage[static_cast<std::size_t>(stage_of(plan.schedule, plan.pp, rank, turn.chunk))];
        };
        for (std::size_t i = 0; i < turns.size(); ++i) {
            if (turns[i].merged) {
                merged[{distinct(turns[i]), distinct(turns[i + 1])}] += 1.0;
                ++i;
            } else {
                alone[turns[i].forward() ? 0 : 1][static_cast<std::size_t>(distinct(turns[i]))] += 1.0;
            }
        }
    }

    // The counts of more micro-batches, which grow by the same numbers as those from `shorter` to these do.
    void extend(const Turns& shorter, double times) {
        for (auto& [pair, count] : merged) {
            const auto before = shorter.merged.find(pair);
            count += times * (count - (before == shorter.merged.end() ? 0.0 : before->second));
        }
        for (int side = 0; side < 2; ++side)
            for (std::size_t d = 0; d < alone[side].size(); ++d)
                alone[side][d] += times * (alone[side][d] - shorter.alone[side][d]);
    }
};

Turns turns_of(const Plan& plan, const Shape& shape, Orders& orders, int rank) {
    const Probe probe(plan);
    const int m = plan.micro_batches();
    const auto turns = [&](int micro_batches) {
        return Turns(orders.of(plan, micro_batches, rank).turns, shape, plan, rank);
    };
    if (m <= probe.longer) return turns(m);
    Turns result = turns(probe.longer);
    result.extend(turns(probe.shorter), static_cast<double>(m - probe.longer) / (probe.longer - probe.shorter));
    return result;
}

} // namespace

double FastQuoter::merged_seconds(const Plan& plan) {
    if (!plan.ep_overlap || splits_backward(plan.schedule)) return 0.0;
    const int layers_handle = layers(plan), stages_handle = stages(plan);
    Layers& layers = layers_[static_cast<std::size_t>(layers_handle)];
    Stages& stages = filled_with(layers, stages_handle);
    const Shape& shape = *stages.shape;
    std::vector<Turns> turns;
    std::map<Pair, double> all;
    for (int r = 0; r < plan.pp; ++r) {
        turns.push_back(turns_of(plan, shape, sources_.orders, r));
        for (const auto& [pair, count] : turns.back().merged) all[pair] += count;
    }
    if (all.empty()) return 0.0;
    const Pair most = std::max_element(all.begin(), all.end(), [](const auto& a, const auto& b) {
                          return a.second < b.second;
                      })->first;
    const auto segments = [&](int d) -> const Segments& {
        return shape.distinct[static_cast<std::size_t>(d)].segments;
    };
    const CostModel costs(plan, sources_.segments.stack(), sources_.segments.machine());
    MergedPlayer player(costs);
    // A pair that does not begin together takes no longer than one behind the other.
    const double apart =
        chunks_[static_cast<std::size_t>(most.first)].forward + chunks_[static_cast<std::size_t>(most.second)].backward;
    const double pair_seconds =
        std::min(apart, sources_.segments.merged(plan, player, segments(most.first), segments(most.second)).ahead);
    slots_.clear();
    for (const Turns& rank : turns) {
        double seconds = 0.0;
        Busy busy{};
        for (std::size_t d = 0; d < chunks_.size(); ++d)
            seconds += rank.alone[0][d] * chunks_[d].forward + rank.alone[1][d] * chunks_[d].backward;
        for (const auto& [pair, count] : rank.merged) {
            if (pair == most) {
                seconds += count * pair_seconds;
                continue;
            }
            const Chunk &forward = chunks_[static_cast<std::size_t>(pair.first)],
                        &backward = chunks_[static_cast<std::size_t>(pair.second)];
            for (std::size_t s = 0; s < stream_count; ++s)
                busy[s] += count * (forward.busy_forward[s] + backward.busy_backward[s]);
        }
        const auto rank_number = static_cast<int>(slots_.size());
        slots_.push_back(seconds + *std::max_element(busy.begin(), busy.end()) - first_saves(stages, rank_number));
    }
    return composed(layers, stages, slots_);
}

} // namespace moe
