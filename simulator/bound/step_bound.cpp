// Composes the bound of a step from layer costs and a stage split, and states why no plan is faster.
//
// The floor of a step. A rank's slots run one after another, each at least as long as its segments played alone with
// the host far ahead. Before rank r's first slot, the first forward of the ranks before it has to be through and its
// message to arrive; behind its last slot, the last backward of those ranks has to follow. So no rank is through before
//     max(start_r + slots_r, issue_r) + tail_r,
// where issue_r is what its host needs, and the optimizer follows the last. No rank starts before the weights of its
// first chunk are gathered, none is through before their gradients are reduced (see add_ends()). A forward merged with
// a backward lasts at least as long as each stream is busy in both. Anything else that happens (stages that wait for
// each other in the middle) only adds.
#include "simulator/bound/bound_model.hpp"
#include "simulator/estimate/step_parts.hpp"

#include <algorithm>
#include <map>

namespace moe::bound {
namespace {

using Pair = std::pair<int, int>; // distinct stages, of the forward and of the backward

// The slots of a rank, for a number of micro-batches.
struct Turns {
    std::map<Pair, double> merged;
    std::vector<double> alone[2]; // seconds of forwards and backwards by distinct stage

    Turns(const std::vector<plan::Turn>& turns, const estimate::Shape& shape, const plan::Plan& plan, int rank) {
        for (std::vector<double>& counts : alone) counts.assign(shape.distinct.size(), 0.0);
        const auto distinct = [&](const plan::Turn& turn) {
            return shape.of_stage[static_cast<std::size_t>(plan::stage_of(plan.schedule, plan.pp, rank, turn.chunk))];
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

Turns turns_of(const plan::Plan& plan, const estimate::Shape& shape, estimate::Orders& orders, int rank) {
    const estimate::Probe probe(plan);
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

void FastBoundModel::sum_chunks(const Layers& layers, const Stages& stages) {
    chunks_.clear();
    memory_ = stages.memory;
    for (std::size_t d = 0; d < stages.parts.size(); ++d) {
        const auto& parts = stages.parts[d];
        Chunk chunk;
        estimate::StageMemory& memory = memory_[d];
        for (const auto& [index, count] : parts) {
            const Terms& t = *layers.terms[static_cast<std::size_t>(index)];
            for (const SideTerms& side : t.sides) chunk.host += (side.waits ? 0.0 : side.host) * count;
            chunk.forward += t.sides[0].device * count;
            chunk.backward += t.sides[1].device * count;
            chunk.first_saves += t.first_saves * count;
            memory.workspace.forward = std::max(memory.workspace.forward, t.workspace.forward);
            memory.workspace.backward = std::max(memory.workspace.backward, t.workspace.backward);
            memory.groups |= t.groups;
            if (!layers.plan.ep_overlap && !plan::splits_backward(stages.plan.schedule)) continue;
            for (std::size_t s = 0; s < program::stream_count; ++s) {
                chunk.busy_forward[s] += t.sides[0].busy[s] * count;
                chunk.busy_backward[s] += t.sides[1].busy[s] * count;
            }
            if (plan::splits_backward(stages.plan.schedule)) continue;
            constexpr auto compute = static_cast<std::size_t>(program::Stream::compute);
            chunk.busy_forward[compute] += (t.sides[0].merged - t.sides[0].busy[compute]) * count;
            chunk.busy_backward[compute] += (t.sides[1].merged - t.sides[1].busy[compute]) * count;
        }
        // Weights come and gradients go under any slot of the chunk, but all of them have to.
        if (layers.plan.reshards()) {
            const double moved = resharding_seconds(layers.terms);
            constexpr auto data = static_cast<std::size_t>(program::Stream::data);
            chunk.backward += std::max(0.0, moved - chunk.forward - chunk.backward);
            chunk.busy_backward[data] = std::max(0.0, moved - chunk.busy_forward[data]);
        }
        if (!parts.empty()) {
            const auto first = [&](const std::pair<int, int>& part, int side) {
                return layers.terms[static_cast<std::size_t>(part.first)]->sides[side].before_input;
            };
            chunk.early_forward = std::min(first(parts.front(), 0), chunk.forward);
            chunk.early_backward = std::min(first(parts.back(), 1), chunk.backward);
        }
        add_ends(layers, stages, d, chunk);
        chunks_.push_back(chunk);
    }
}

// Adds the time of gathers and reductions: a step begins with the weights of each rank's first chunk, and ends with
// their gradients. The weights of segments up to one are gathered before that one's first forward ends; their gradients
// are reduced behind the backward of that one, since it precedes those of the segments before. A pipeline's chunk has
// one bucket for each group, whole before its first segment is through. Without a pipeline there are several, of
// unknown length: each segment counts as one, and takes its share of the time of all in one.
//
// Where they are hidden they slow down what computes (ContentionPrice). All of R seconds of reductions do so, but those
// beside the N seconds of a backward that do not compute and the X behind it, and the backward and X become longer by
// lost * (R - N - X) + X, which is lost * (R - N) at least.
void FastBoundModel::add_ends(const Layers& layers, const Stages& stages, std::size_t stage, Chunk& chunk) {
    const std::vector<std::pair<int, int>>& parts = stages.parts[stage];
    constexpr auto compute = static_cast<std::size_t>(program::Stream::compute);
    const bool split = plan::splits_backward(stages.plan.schedule);
    for (std::size_t s = 0; s < (split ? program::stream_count : compute + 1); ++s) {
        // The seconds that split_bound() and slots() take a segment's sides for.
        const auto seconds = [&](std::size_t part, std::size_t side) {
            const SideTerms& terms = layers.terms[static_cast<std::size_t>(parts[part].first)]->sides[side];
            const bool whole = !split || (s == compute && side == 0 && !layers.plan.ep_overlap);
            return whole ? terms.device : terms.busy[s];
        };
        double forward = 0.0, backward = 0.0; // seconds of the parts before
        double gathered = 0.0, reduced = 0.0, quantized = 0.0;
        double &opening = chunk.opening[s], &behind = chunk.behind[s];
        std::size_t part = 0;
        for (const Moved& moved : stages.moved[stage]) {
            for (; part < static_cast<std::size_t>(moved.part); ++part) {
                forward += parts[part].second * seconds(part, 0);
                backward += parts[part].second * seconds(part, 1);
            }
            gathered += moved.gather;
            reduced += moved.reduce;
            quantized += moved.quantize;
            opening = std::max(opening, gathered - forward - moved.segments * seconds(part, 0));
            behind = std::max(behind, reduced - backward - moved.segments * seconds(part, 1));
        }
        if (s != compute || stages.lost == 0.0) continue;
        double idle[2] = {0.0, 0.0};
        for (std::size_t p = 0; p < parts.size(); ++p)
            for (std::size_t side = 0; side < 2; ++side) {
                const Terms& terms = *layers.terms[static_cast<std::size_t>(parts[p].first)];
                idle[side] += parts[p].second * (seconds(p, side) - terms.sides[side].busy[compute]);
            }
        opening = std::max(opening, stages.lost * (gathered - quantized - idle[0]));
        behind = std::max(behind, stages.lost * (reduced - idle[1]));
    }
}

// Seconds from the step's start until a rank's host has issued all slots but the last.
double FastBoundModel::issue(const Stages& stages, int rank, int micro_batches) const {
    double sum = 0.0, longest = 0.0;
    for (int c = 0; c < stages.plan.vpp; ++c) {
        const double host = chunk(stages, rank, c).host;
        sum += micro_batches * host;
        longest = std::max(longest, host);
    }
    return sum - longest;
}

// Seconds that a rank's slots take at least, one after another.
double FastBoundModel::slots(const Layers& layers, const Stages& stages, int rank, int micro_batches) const {
    const plan::Plan& plan = stages.plan;
    const double m = micro_batches;
    if (!layers.plan.ep_overlap) {
        double sum = 0.0;
        for (int c = 0; c < plan.vpp; ++c) sum += chunk(stages, rank, c).forward + chunk(stages, rank, c).backward;
        return m * sum - first_saves(stages, rank);
    }
    // The first forwards and the last backwards have no partner: as many of them as order() warms up with.
    const bool one = plan.schedule == plan::ScheduleKind::one_f_one_b;
    const int alone = plan::warm_up_forwards(plan.schedule, plan.pp, plan.vpp, micro_batches, rank, true);
    const int round = plan.pp * plan.vpp, rest = alone % round;
    double unmerged = 0.0;
    Busy busy{};
    double& computing = busy[static_cast<std::size_t>(program::Stream::compute)];
    for (int c = 0; c < plan.vpp; ++c) {
        const Chunk& held = chunk(stages, rank, c);
        // Backwards leave the chunks in the order in which forwards came.
        const int lone = one ? alone : alone / round * plan.pp + std::clamp(rest - c * plan.pp, 0, plan.pp);
        unmerged += lone * (held.forward + held.backward);
        for (std::size_t s = 0; s < program::stream_count; ++s)
            busy[s] += (m - lone) * (held.busy_forward[s] + held.busy_backward[s]);
        (lone < micro_batches ? computing : unmerged) -= held.first_saves;
    }
    return unmerged + *std::max_element(busy.begin(), busy.end());
}

double FastBoundModel::first_saves(const Stages& stages, int rank) const {
    double sum = 0.0;
    for (int c = 0; c < stages.plan.vpp; ++c) sum += chunk(stages, rank, c).first_saves;
    return sum;
}

// Backwards in two slots fill bubbles and waits in ways of their own, but run behind forwards on the same stream: no
// rank is through before its forwards and what its backwards compute, or before its busiest stream, which begins when
// the first message has come. None needs less than its states and what it keeps for its dgrads.
search::LowerBound FastBoundModel::split_bound(const Layers& layers, Stages& stages, int micro_batches) {
    const plan::Plan& plan = stages.plan;
    const double message = stages.message_start + layers.message_bytes * stages.message_per_byte;
    constexpr auto compute = static_cast<std::size_t>(program::Stream::compute);
    double start = 0.0, worst = 0.0;
    const auto forward_of = [&layers](const Chunk& held) {
        return layers.plan.ep_overlap ? held.busy_forward[compute] : held.forward;
    };
    for (int r = 0; r < plan.pp; ++r) {
        Busy busy{};
        for (int c = 0; c < plan.vpp; ++c) {
            const Chunk& held = chunk(stages, r, c);
            for (std::size_t s = 0; s < program::stream_count; ++s)
                busy[s] += held.busy_forward[s] + held.busy_backward[s];
            busy[compute] += forward_of(held) - held.busy_forward[compute];
        }
        const Chunk& first = chunk(stages, r, 0);
        start = std::max(0.0, start - (r == 0 ? 0.0 : first.early_forward));
        for (std::size_t s = 0; s < program::stream_count; ++s) {
            if (busy[s] == 0.0) continue;
            const double saved = s == compute ? first_saves(stages, r) : 0.0;
            worst =
                std::max(worst, std::max(start, first.opening[s]) + micro_batches * busy[s] - saved + first.behind[s]);
        }
        start = std::max(start, first.opening[compute]) + forward_of(first) + message;
    }
    for (estimate::StageMemory& memory : memory_) memory.workspace = {};
    return {worst + stages.closing, filled(layers, stages)};
}

double FastBoundModel::composed(const Layers& layers, const Stages& stages, const std::vector<double>& slots) {
    const plan::Plan& plan = stages.plan;
    const int m = plan.micro_batches();
    const double message = stages.message_start + layers.message_bytes * stages.message_per_byte;
    constexpr auto whole = static_cast<std::size_t>(program::Stream::compute);
    ends_.clear();
    double start = stages.zero;
    for (int r = 0; r < plan.pp; ++r) {
        const Chunk& first = chunk(stages, r, 0);
        start = std::max({0.0, first.opening[whole], start - (r == 0 ? 0.0 : first.early_forward)});
        ends_.push_back(start + slots[static_cast<std::size_t>(r)]);
        start += first.forward + message;
    }
    // Ranks go from the last one on, through whose last backwards those of the ranks before it have to wait.
    double end = 0.0, issued = 0.0, worst = 0.0;
    for (int r = plan.pp; r-- > 0;) {
        const Chunk& first = chunk(stages, r, 0);
        // A message that leaves before the weights' gradients: how much before is not told by slots.
        const double backward = first.backward - (m == 1 ? first.first_saves : 0.0);
        const double passes = r + 1 == plan.pp
                                  ? 0.0
                                  : message + (plan.delay_wgrad ? 0.0 : std::max(0.0, backward - first.early_backward));
        end = std::max(end + passes, ends_[static_cast<std::size_t>(r)]);
        issued = std::max(issued + passes, issue(stages, r, m));
        worst = std::max(worst, end + first.behind[whole]);
    }
    const double seconds = std::max(worst, issued) + stages.closing;
    return m < plan.pp || offloads(layers.plan) ? seconds * tiers_apart : seconds;
}

FastBoundModel::Stages& FastBoundModel::filled_with(Layers& layers, int stages_handle) {
    Stages& stages = *stages_[static_cast<std::size_t>(stages_handle)];
    complete(layers, stages);
    stages.plan.mbs = layers.plan.mbs;
    stages.plan.dispatcher = layers.plan.dispatcher; // Communicators depend on it.
    stages.plan.cp_comm = layers.plan.cp_comm;       // Attention's scratch depends on it.
    stages.plan.ep_overlap = layers.plan.ep_overlap;
    sum_chunks(layers, stages);
    return stages;
}

search::LowerBound FastBoundModel::bound(int layers_handle, int stages_handle) {
    Layers& layers = layers_[static_cast<std::size_t>(layers_handle)];
    Stages& stages = filled_with(layers, stages_handle);
    const plan::Plan& plan = stages.plan;
    const int m = plan.micro_batches();
    if (plan::splits_backward(plan.schedule)) return split_bound(layers, stages, m);
    slots_.clear();
    for (int r = 0; r < plan.pp; ++r) slots_.push_back(slots(layers, stages, r, m));
    search::LowerBound bound;
    bound.step_seconds = composed(layers, stages, slots_);
    bound.memory_bytes = filled(layers, stages);
    return bound;
}

// Bytes of the fullest rank: memory_ and what its chunks keep together.
double FastBoundModel::filled(const Layers& layers, Stages& stages) {
    saved_.clear();
    for (const auto& [most, merges] : kept(layers, stages)) {
        double bytes = 0.0;
        for (std::size_t p = 0; p < layers.pool_bytes.size(); ++p) bytes += most[p] * layers.pool_bytes[p];
        saved_.push_back({bytes, merges});
    }
    return estimate::peak_bytes(stages.plan, *stages.mesh, memory_, stages.shape->of_stage, saved_);
}

double FastBoundModel::merged_step_bound(const plan::Plan& plan) {
    // A pair played alone waits for what was offloaded; within a step that comes back beside the slots before it.
    if (!plan.ep_overlap || plan::splits_backward(plan.schedule) || offloads(plan)) return 0.0;
    const int layers_handle = layer_costs(plan), stages_handle = stage_split(plan);
    Layers& layers = layers_[static_cast<std::size_t>(layers_handle)];
    Stages& stages = filled_with(layers, stages_handle);
    const estimate::Shape& shape = *stages.shape;
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
    const auto segments = [&](int d) -> const estimate::Segments& {
        return shape.distinct[static_cast<std::size_t>(d)].segments;
    };
    const cost::CostModel costs(plan, sources_.segments.stack(), sources_.segments.machine());
    estimate::MergedPlayer player(costs);
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
            for (std::size_t s = 0; s < program::stream_count; ++s)
                busy[s] += count * (forward.busy_forward[s] + backward.busy_backward[s]);
        }
        const auto rank_number = static_cast<int>(slots_.size());
        slots_.push_back(seconds + *std::max_element(busy.begin(), busy.end()) - first_saves(stages, rank_number));
    }
    return composed(layers, stages, slots_);
}

std::unique_ptr<search::BoundModel> make_bound_model(BoundSources sources) {
    return std::make_unique<FastBoundModel>(sources);
}

} // namespace moe::bound
