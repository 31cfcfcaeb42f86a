// Composes quotes from flat segments, and states why no plan is faster.
//
// The floor of a step. A rank's slots run one after another, each at least as long as its segments played alone with
// the host far ahead. Before rank r's first slot, the first forward of the ranks before it has to be through and its
// message to arrive; behind its last slot, the last backward of those ranks has to follow. So no rank is through before
//     max(start_r + slots_r, issue_r) + tail_r,
// where issue_r is what its host needs, and the optimizer follows the last. No rank starts before the weights of its
// first chunk are gathered, none is through before their gradients are reduced (quote_ends.cpp). A forward merged with
// a backward lasts at least as long as each stream is busy in both. What else happens (stages that wait for each other
// in the middle) only adds. Ranks on average hold an even share of all layers, which is the floor of every cut.
#include "simulator/bound/bound_model.hpp"

#include <algorithm>

namespace moe {
namespace {

// Played op by op, slots of a pipeline that is never full, and those that share the link to the host, overlap a little:
// by what the tiers may differ.
constexpr double tiers_apart = 0.97;

} // namespace

void FastQuoter::sum_chunks(const Layers& layers, const Stages& stages) {
    chunks_.clear();
    memory_ = stages.memory;
    for (std::size_t d = 0; d < stages.parts.size(); ++d) {
        const auto& parts = stages.parts[d];
        Chunk chunk;
        StageMemory& memory = memory_[d];
        for (const auto& [index, count] : parts) {
            const Terms& t = *layers.terms[static_cast<std::size_t>(index)];
            for (const SideTerms& side : t.sides) chunk.host += (side.waits ? 0.0 : side.host) * count;
            chunk.forward += t.sides[0].device * count;
            chunk.backward += t.sides[1].device * count;
            chunk.first_saves += t.first_saves * count;
            memory.workspace.forward = std::max(memory.workspace.forward, t.workspace.forward);
            memory.workspace.backward = std::max(memory.workspace.backward, t.workspace.backward);
            memory.groups |= t.groups;
            if (!layers.plan.ep_overlap && !splits_backward(stages.plan.schedule)) continue;
            for (std::size_t s = 0; s < stream_count; ++s) {
                chunk.busy_forward[s] += t.sides[0].busy[s] * count;
                chunk.busy_backward[s] += t.sides[1].busy[s] * count;
            }
            if (splits_backward(stages.plan.schedule)) continue;
            constexpr auto compute = static_cast<std::size_t>(Stream::compute);
            chunk.busy_forward[compute] += (t.sides[0].merged - t.sides[0].busy[compute]) * count;
            chunk.busy_backward[compute] += (t.sides[1].merged - t.sides[1].busy[compute]) * count;
        }
        // Weights come and gradients go under any slot of the chunk, but all of them have to.
        if (layers.plan.reshards()) {
            const double moved = resharding_seconds(layers.terms);
            constexpr auto data = static_cast<std::size_t>(Stream::data);
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

// Seconds from the step's start until a rank's host has issued all slots but the last.
double FastQuoter::issue(const Stages& stages, int rank, int micro_batches) const {
    double sum = 0.0, longest = 0.0;
    for (int c = 0; c < stages.plan.vpp; ++c) {
        const double host = chunk(stages, rank, c).host;
        sum += micro_batches * host;
        longest = std::max(longest, host);
    }
    return sum - longest;
}

// Seconds that a rank's slots take at least, one after another.
double FastQuoter::slots(const Layers& layers, const Stages& stages, int rank, int micro_batches) const {
    const Plan& plan = stages.plan;
    const double m = micro_batches;
    if (!layers.plan.ep_overlap) {
        double sum = 0.0;
        for (int c = 0; c < plan.vpp; ++c) sum += chunk(stages, rank, c).forward + chunk(stages, rank, c).backward;
        return m * sum - first_saves(stages, rank);
    }
    // The first forwards and the last backwards have no partner: as many of them as order() warms up with.
    const bool one = plan.schedule == ScheduleKind::one_f_one_b;
    const int alone = warm_up_forwards(plan.schedule, plan.pp, plan.vpp, micro_batches, rank, true);
    const int round = plan.pp * plan.vpp, rest = alone % round;
    double unmerged = 0.0;
    Busy busy{};
    double& computing = busy[static_cast<std::size_t>(Stream::compute)];
    for (int c = 0; c < plan.vpp; ++c) {
        const Chunk& held = chunk(stages, rank, c);
        // Backwards leave the chunks in the order in which forwards came.
        const int lone = one ? alone : alone / round * plan.pp + std::clamp(rest - c * plan.pp, 0, plan.pp);
        unmerged += lone * (held.forward + held.backward);
        for (std::size_t s = 0; s < stream_count; ++s)
            busy[s] += (m - lone) * (held.busy_forward[s] + held.busy_backward[s]);
        (lone < micro_batches ? computing : unmerged) -= held.first_saves;
    }
    return unmerged + *std::max_element(busy.begin(), busy.end());
}

double FastQuoter::first_saves(const Stages& stages, int rank) const {
    double sum = 0.0;
    for (int c = 0; c < stages.plan.vpp; ++c) sum += chunk(stages, rank, c).first_saves;
    return sum;
}

const FastQuoter::KeptSegments& FastQuoter::kept(const Layers& layers, Stages& stages) {
    const Plan& plan = stages.plan;
    const int enough = enough_micro_batches(plan);
    const KeptSegments*& known = stages.kept[{enough, plan.ep_overlap ? 1 : 0, layers.pools}];
    if (known != nullptr) return *known;
    const auto [it, fresh] = kept_.try_emplace({stages.shape, plan.schedule, enough, plan.ep_overlap, layers.pools});
    known = &it->second;
    if (!fresh) return *known;
    const std::vector<int>& pools = pools_[static_cast<std::size_t>(layers.pools)];
    std::vector<SavedSegments> saved(stages.parts.size());
    for (std::size_t d = 0; d < saved.size(); ++d) {
        for (const auto& [index, count] : stages.parts[d]) {
            const int pool = pools[static_cast<std::size_t>(index)];
            if (pool >= 0) saved[d].add(segments_[static_cast<std::size_t>(index)].kind, count, pool);
        }
    }
    for (int r = 0; r < plan.pp; ++r) {
        std::vector<const SavedSegments*> chunks;
        for (int c = 0; c < plan.vpp; ++c)
            chunks.push_back(&saved[static_cast<std::size_t>(
                stages.shape->of_stage[static_cast<std::size_t>(stage_of(plan.schedule, plan.pp, r, c))])]);
        const std::vector<Kept>& kept = sources_.orders.of(plan, enough, r).kept;
        std::vector<int> most(layers.pool_bytes.size(), 0);
        for (const auto& [pool, segments] : most_kept(chunks, kept)) most[static_cast<std::size_t>(pool)] = segments;
        it->second.push_back({std::move(most), merges(kept)});
    }
    return *known;
}

// Backwards in two slots fill bubbles and waits in ways of their own, but run behind forwards on the same stream: no
// rank is through before its forwards and what its backwards compute, or before its busiest stream, which begins when
// the first message has come. None needs less than its states and what it keeps for its dgrads.
Quote FastQuoter::split_quote(const Layers& layers, Stages& stages, int micro_batches) {
    const Plan& plan = stages.plan;
    const double message = stages.message_start + layers.message_bytes * stages.message_per_byte;
    constexpr auto compute = static_cast<std::size_t>(Stream::compute);
    double start = 0.0, worst = 0.0;
    const auto forward_of = [&layers](const Chunk& held) {
        return layers.plan.ep_overlap ? held.busy_forward[compute] : held.forward;
    };
    for (int r = 0; r < plan.pp; ++r) {
        Busy busy{};
        for (int c = 0; c < plan.vpp; ++c) {
            const Chunk& held = chunk(stages, r, c);
            for (std::size_t s = 0; s < stream_count; ++s) busy[s] += held.busy_forward[s] + held.busy_backward[s];
            busy[compute] += forward_of(held) - held.busy_forward[compute];
        }
        const Chunk& first = chunk(stages, r, 0);
        start = std::max(0.0, start - (r == 0 ? 0.0 : first.early_forward));
        for (std::size_t s = 0; s < stream_count; ++s) {
            if (busy[s] == 0.0) continue;
            const double saved = s == compute ? first_saves(stages, r) : 0.0;
            worst =
                std::max(worst, std::max(start, first.opening[s]) + micro_batches * busy[s] - saved + first.behind[s]);
        }
        start = std::max(start, first.opening[compute]) + forward_of(first) + message;
    }
    for (StageMemory& memory : memory_) memory.workspace = {};
    return {worst + stages.closing, filled(layers, stages)};
}

double FastQuoter::composed(const Layers& layers, const Stages& stages, const std::vector<double>& slots) {
    const Plan& plan = stages.plan;
    const int m = plan.micro_batches();
    const double message = stages.message_start + layers.message_bytes * stages.message_per_byte;
    constexpr auto whole = static_cast<std::size_t>(Stream::compute);
    ends_.clear();
    double start = stages.zero;
    for (int r = 0; r < plan.pp; ++r) {
        const Chunk& first = chunk(stages, r, 0);
        start = std::max({0.0, first.opening[whole], start - (r == 0 ? 0.0 : first.early_forward)});
        ends_.push_back(start + slots[static_cast<std::size_t>(r)]);
        start += first.forward + message;
    }
    // From the last rank on, through whose last backwards those of the ranks before it have to wait.
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

FastQuoter::Stages& FastQuoter::filled_with(Layers& layers, int stages_handle) {
    Stages& stages = *stages_[static_cast<std::size_t>(stages_handle)];
    complete(layers, stages);
    stages.plan.mbs = layers.plan.mbs;
    stages.plan.dispatcher = layers.plan.dispatcher; // of its communicators
    stages.plan.ep_overlap = layers.plan.ep_overlap;
    sum_chunks(layers, stages);
    return stages;
}

Quote FastQuoter::quote(int layers_handle, int stages_handle) {
    Layers& layers = layers_[static_cast<std::size_t>(layers_handle)];
    Stages& stages = filled_with(layers, stages_handle);
    const Plan& plan = stages.plan;
    const int m = plan.micro_batches();
    if (splits_backward(plan.schedule)) return split_quote(layers, stages, m);
    slots_.clear();
    for (int r = 0; r < plan.pp; ++r) slots_.push_back(slots(layers, stages, r, m));
    Quote quote;
    quote.step_seconds = composed(layers, stages, slots_);
    quote.memory_bytes = filled(layers, stages);
    return quote;
}

// Bytes of the fullest rank: memory_ and what its chunks keep together.
double FastQuoter::filled(const Layers& layers, Stages& stages) {
    saved_.clear();
    for (const auto& [most, merges] : kept(layers, stages)) {
        double bytes = 0.0;
        for (std::size_t p = 0; p < layers.pool_bytes.size(); ++p) bytes += most[p] * layers.pool_bytes[p];
        saved_.push_back({bytes, merges});
    }
    return peak_bytes(stages.plan, memory_, stages.shape->of_stage, saved_);
}

double FastQuoter::floor(int handle) {
    const Layers& layers = layers_[static_cast<std::size_t>(handle)];
    return spread(layers.plan, layers.terms);
}

double FastQuoter::spread(const Plan& plan, const std::vector<const Terms*>& terms) {
    const double micro_batches = static_cast<double>(plan.gbs) / static_cast<double>(plan.mbs);
    const double share = micro_batches * plan.tp * plan.cp / plan.gpus;
    double saved = 0.0; // by the first backward of every layer
    for (std::size_t i = 0; i < counts_.size(); ++i)
        if (counts_[i] > 0) saved += counts_[i] * terms[i]->first_saves;
    const Passing least = least_of_all(plan, terms);
    const double even = std::max(share * least.computing - saved / plan.pp, share * least.other);
    return (even + least_visit(plan) + sources_.segments.stack().costs.step_seconds) *
           (offloads(plan) ? tiers_apart : 1.0);
}

// Seconds that FSDP moves weights and gradients of a micro-batch, at least: what the last layer of a kind gathered for
// its forward may still be there for its backward.
double FastQuoter::resharding_seconds(const std::vector<const Terms*>& terms) const {
    constexpr auto data = static_cast<std::size_t>(Stream::data);
    double sum = 0.0;
    for (std::size_t i = 0; i < counts_.size(); ++i) {
        if (counts_[i] == 0) continue;
        const Terms& t = *terms[i];
        sum += counts_[i] * t.sides[0].busy[data] + std::max(0, counts_[i] - 1) * t.sides[1].busy[data];
    }
    return sum;
}

FastQuoter::Passing FastQuoter::least_of_all(const Plan& plan, const std::vector<const Terms*>& terms) const {
    double device = 0.0, merged = 0.0, split = 0.0; // apart, side by side, backwards in two slots
    Busy busy{};
    constexpr auto compute = static_cast<std::size_t>(Stream::compute);
    for (std::size_t i = 0; i < counts_.size(); ++i) {
        if (counts_[i] == 0) continue;
        const Terms& t = *terms[i];
        device += counts_[i] * (t.sides[0].device + t.sides[1].device);
        for (std::size_t s = 0; s < stream_count; ++s)
            busy[s] += counts_[i] * (t.sides[0].busy[s] + t.sides[1].busy[s]);
        merged += counts_[i] * (t.sides[0].merged + t.sides[1].merged);
        split += counts_[i] * (t.sides[0].device + t.sides[1].busy[compute]);
    }
    const double moved = plan.reshards() ? resharding_seconds(terms) : 0.0;
    if (!plan.ep_overlap && !splits_backward(plan.schedule)) return {device, moved};
    if (plan.reshards()) busy[static_cast<std::size_t>(Stream::data)] = moved;
    Passing least{busy[compute], 0.0};
    for (std::size_t s = 0; s < stream_count; ++s)
        if (s != compute) least.other = std::max(least.other, busy[s]);
    if (!plan.ep_overlap)
        least.computing = std::max(least.computing, split);
    else if (!splits_backward(plan.schedule))
        least.computing = std::max(least.computing, merged);
    return least;
}

std::unique_ptr<Quoter> make_quoter(QuoteSources sources) { return std::make_unique<FastQuoter>(sources); }

} // namespace moe
