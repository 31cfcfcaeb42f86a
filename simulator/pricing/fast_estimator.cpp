// Plays a few groups of micro-batches of a plan's step model and extrapolates.
#include "simulator/pricing/fast_estimator.hpp"

#include "planner/base/error.hpp"
#include "planner/lower/emit/builder.hpp"
#include "planner/lower/emit/parameters.hpp"
#include "planner/lower/unnamed.hpp"
#include "planner/memory/retry_memory.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/overflow_retry.hpp"
#include "simulator/bound/bound.hpp"
#include "simulator/estimate/stage_memory.hpp"
#include "simulator/estimate/step_parts.hpp"
#include "simulator/replay/simulate.hpp"

#include <algorithm>
#include <utility>

namespace moe::pricing {

struct FastEstimator::State {
    State(std::shared_ptr<const machine::Hardware> h, stack::Stack s)
        : hardware(std::move(h)), segments(*hardware, std::move(s)) {}
    std::shared_ptr<const machine::Hardware> hardware;
    estimate::SegmentCache segments;
    estimate::Shapes shapes;
    estimate::Orders orders;
    bound::SegmentLibrary library;
    bound::PartFloors parts;
    replay::RowRoom rows;
};

namespace {

void add_parts(search::Breakdown& sum, const search::Breakdown& part, double times) {
    sum.compute += times * part.compute;
    sum.tensor += times * part.tensor;
    sum.context += times * part.context;
    sum.expert += times * part.expert;
    sum.data += times * part.data;
    sum.recompute += times * part.recompute;
    sum.host += times * (part.host + part.bubble);
}

constexpr double search::Breakdown::*all_parts[] = {&search::Breakdown::compute,   &search::Breakdown::tensor,
                                                    &search::Breakdown::context,   &search::Breakdown::expert,
                                                    &search::Breakdown::pipeline,  &search::Breakdown::bubble,
                                                    &search::Breakdown::data,      &search::Breakdown::optimizer,
                                                    &search::Breakdown::recompute, &search::Breakdown::host};

void add_difference(search::Breakdown& sum, const search::Breakdown& more, const search::Breakdown& less,
                    double times) {
    for (const auto part : all_parts) sum.*part += times * (more.*part - less.*part);
}

double least(const search::Breakdown& b) {
    double part = b.compute;
    for (const auto other : all_parts) part = std::min(part, b.*other);
    return part;
}

search::Breakdown split(estimate::SegmentCache& cache, const plan::Plan& plan, const estimate::StepModel& model,
                        std::size_t rank, const estimate::RankPlay& play, double step) {
    search::Breakdown sum;
    for (const int c : model.ranks[rank])
        for (const auto& [id, count] : model.chunks[static_cast<std::size_t>(c)].segments) {
            const estimate::SegmentCost& cost = cache.cost(plan, id);
            const double times = static_cast<double>(count) * plan.micro_batches();
            add_parts(sum, cost.forward.parts, times);
            add_parts(sum, cost.backward.parts, times);
            sum.compute -= count * (cost.backward.device - cost.first_backward.device);
        }
    // Overlap saves exposed dispatch and combine; anything beyond that was waiting inside the slots.
    const double hidden = std::min(play.saved, sum.expert);
    sum.expert -= hidden;
    sum.host = std::max(0.0, sum.host + play.host + model.per_step - (play.saved - hidden));
    sum.data += play.data;
    sum.optimizer = play.optimizer;
    const double known =
        sum.compute + sum.tensor + sum.context + sum.expert + sum.data + sum.optimizer + sum.recompute + sum.host;
    sum.bubble = step - known;
    if (sum.bubble < 0.0) { // Rounding of the extrapolation shrinks what is estimated, so that no time is negative.
        const double scale = step / known;
        for (double* part : {&sum.compute, &sum.tensor, &sum.context, &sum.expert, &sum.data, &sum.optimizer,
                             &sum.recompute, &sum.host})
            *part *= scale;
        sum.bubble = 0.0;
    }
    return sum;
}

// Splits the step of the rank that waits least for others, as simulate() chooses it.
search::Breakdown split(estimate::SegmentCache& cache, const plan::Plan& plan, const estimate::StepModel& model,
                        const std::vector<estimate::RankPlay>& plays, double step) {
    search::Breakdown result;
    for (std::size_t r = 0; r < plays.size(); ++r) {
        const search::Breakdown parts = split(cache, plan, model, r, plays[r], step);
        if (r == 0 || parts.bubble < result.bubble) result = parts;
    }
    return result;
}

// Seconds that the busiest rank computes for `micro_batches`: a long step grows by no less, even where the few
// micro-batches that were played still ran ahead of that rank.
double busiest(const estimate::StepModel& model, int micro_batches) {
    double most = 0.0;
    for (const std::vector<int>& chunks : model.ranks) {
        double sum = 0.0;
        for (const int c : chunks) {
            const estimate::ChunkModel& chunk = model.chunks[static_cast<std::size_t>(c)];
            sum += chunk.forward.from_device.device + chunk.backward.from_device.device;
        }
        most = std::max(most, sum * micro_batches);
    }
    return most;
}

std::vector<estimate::RankPlay> extrapolate(const plan::Plan& plan, const estimate::StepModel& model,
                                            estimate::Orders& orders) {
    const int m = plan.micro_batches();
    const auto [shorter, longer] = estimate::Probe(plan);
    if (m <= longer) return estimate::play_step(plan, model, orders, m);
    std::vector<estimate::RankPlay> a = estimate::play_step(plan, model, orders, shorter),
                                    b = estimate::play_step(plan, model, orders, longer);
    const double times = static_cast<double>(m - longer) / (longer - shorter);
    // A lead that the host had from the start (weights being gathered) may be used up only later than was played.
    double late = 0.0;
    const double least = plan.ep_overlap ? 0.0 : busiest(model, longer - shorter);
    for (std::size_t r = 0; r < b.size(); ++r) {
        b[r].end += times * std::max(least, b[r].end - a[r].end);
        b[r].host += times * (b[r].host - a[r].host);
        b[r].saved += times * (b[r].saved - a[r].saved);
        b[r].issued += times * (b[r].issued - a[r].issued);
        late = std::max(late, b[r].issued + b[r].closing - b[r].end);
    }
    for (estimate::RankPlay& play : b) {
        play.end += late;
        play.host += late;
    }
    return b;
}

} // namespace

FastEstimator::FastEstimator(std::shared_ptr<const machine::Hardware> hardware, stack::Stack stack)
    : state_(std::make_unique<State>(std::move(hardware), std::move(stack))) {}
FastEstimator::~FastEstimator() = default;

namespace {

estimate::StageMemory stage_memory(estimate::SegmentCache& cache, const plan::Plan& plan,
                                   const estimate::StageShape& shape, estimate::SavedSegments& saved) {
    estimate::StageMemory m;
    // The step in its place exchanges more rows, for which the engine has room from the start.
    const std::optional<plan::Plan> again = plan::overflow_retry_plan(plan);
    const std::vector<memory::SegmentMemory> memories = estimate::memory_beside_shared(cache, plan, shape.segments);
    for (std::size_t i = 0; i < shape.segments.size(); ++i) {
        const auto& [id, count] = shape.segments[i];
        const estimate::SegmentSize& segment = cache.size(plan, id);
        if (memories[i].saved > 0) saved.add(id.kind, count, memories[i].saved);
        m.workspace.forward = std::max(m.workspace.forward, memories[i].forward);
        m.workspace.backward = std::max(m.workspace.backward, memories[i].backward);
        m.groups |= segment.groups;
        m.slots = std::max({m.slots, segment.slots, again ? cache.size(*again, id).slots : 0});
        if (segment.scaled > 0 && plan::group_size(plan, emit::groups::stage) > 1)
            m.groups |= estimate::group_bit(emit::groups::stage);
    }
    if (plan.reshards()) {
        const estimate::ReshardedMemory resharded = estimate::resharded_memory(cache, plan, shape.segments);
        m.workspace = resharded.workspace;
        m.counted_twice = static_cast<double>(resharded.counted_twice);
    }
    for (const passes::BucketSize& b : estimate::stage_buckets(cache, plan, shape.stage, shape.segments)) {
        m.add_states(plan, b);
        m.groups |= estimate::group_bit(b.group);
        if (b.is_muon() && b.parts > 1) m.groups |= estimate::group_bit({b.domain, b.cut});
    }
    m.add_tables(plan, shape.stage);
    if (shape.stage.loss && plan.dp * plan.cp > 1) m.groups |= estimate::group_bit(emit::groups::samples);
    return m;
}

// Backwards of two slots keep some of what a layer saves for the first and some for the second: liveness tells. HSDP
// has groups of its own, whose communicators the Program counts, and BF16 copies of gradients are as large as their
// bucket.
double laid_out(const plan::Plan& plan) {
    plan::Plan enough = plan;
    enough.gbs = plan.mbs * plan.dp * estimate::enough_micro_batches(plan);
    // Those of the others.
    const double inputs = estimate::micro_batch_input_bytes(plan) * (plan.micro_batches() - enough.micro_batches());
    double worst = 0.0;
    for (int rank = 0; rank < plan.pp; ++rank) {
        const program::Program program = lower::lower_unnamed(enough, rank);
        worst = std::max(worst, replay::rank_memory_bytes(plan, program, memory::plan_memory(program).arena_bytes));
    }
    return (worst + inputs) * (plan.hardware->cpu ? plan.gpus : 1);
}

} // namespace

double FastEstimator::memory_bytes(const plan::Plan& plan) {
    const std::optional<plan::Plan> again = plan::overflow_retry_plan(plan);
    return again ? std::max(held_bytes(plan), held_bytes(*again)) : held_bytes(plan);
}

double FastEstimator::held_bytes(const plan::Plan& plan) {
    if (plan::splits_backward(plan.schedule) || plan.fsdp_replicas > 1 || emit::reduces_copy(plan))
        return laid_out(plan);
    const estimate::Shape& shape = state_->shapes.of(plan);
    std::vector<estimate::StageMemory> stages;
    std::vector<estimate::SavedSegments> segments(shape.distinct.size());
    for (std::size_t i = 0; i < segments.size(); ++i)
        stages.push_back(stage_memory(state_->segments, plan, shape.distinct[i], segments[i]));
    const int enough = estimate::enough_micro_batches(plan);
    std::vector<estimate::KeptActivations> activations;
    for (int r = 0; r < plan.pp; ++r) {
        std::vector<const estimate::SavedSegments*> chunks;
        for (int c = 0; c < plan.vpp; ++c)
            chunks.push_back(&segments[static_cast<std::size_t>(
                shape.of_stage[static_cast<std::size_t>(c) * static_cast<std::size_t>(plan.pp) +
                               static_cast<std::size_t>(r)])]);
        const std::vector<plan::Kept>& kept = state_->orders.of(plan, enough, r).kept;
        activations.push_back({0.0, estimate::merges(kept)});
        for (const auto& [bytes, most] : estimate::most_kept(chunks, kept))
            activations.back().bytes += static_cast<double>(bytes) * most;
    }
    return estimate::peak_bytes(plan, plan::Mesh(plan), stages, shape.of_stage, activations);
}

namespace {

// Plans whose work does not fall into slots of fixed length: weights that come under the layer before (FSDP),
// gradients that are cast around their reduction, activations that share one link to the host, messages that leave
// before their slot ends, backwards of two slots, and pipelines that are never full, which show every slot's beginning.
bool needs_ops(const plan::Plan& plan) {
    return plan.micro_batches() < plan.pp || plan.reshards() || emit::reduces_copy(plan) ||
           (plan.offload & plan::offload::activations) != 0 || plan.delay_wgrad || plan::splits_backward(plan.schedule);
}

// Seconds by which the host's work grows beyond the step's from one play to a longer one: then it comes to be the limit
// only after the lead that it had from the start (weights being gathered).
double catches_up(const replay::Simulation& shorter, const replay::Simulation& longer) {
    const double host = longer.host_seconds - shorter.host_seconds;
    return host - (longer.estimate.step_seconds - shorter.estimate.step_seconds) * 1.001;
}

// Such plans are played op by op, for two numbers of micro-batches, from which the rest follows linearly. Where the
// host has yet to catch up, for twice as many, up to three times.
search::Estimate played_by_ops(const plan::Plan& plan, const stack::Stack& stack, replay::RowRoom& rows) {
    plan::Plan few = plan;
    const auto played = [&](int micro_batches) {
        few.gbs = plan.mbs * plan.dp * micro_batches;
        return replay::timed(few, stack, rows);
    };
    estimate::Probe probe(plan);
    if (plan.pp == 1) probe.shorter = 2, probe.longer = 3;
    const int m = plan.micro_batches();
    if (m <= probe.longer) return played(m).estimate;
    replay::Simulation shorter = played(probe.shorter), longer = played(probe.longer);
    for (int more = 0; more < 3 && catches_up(shorter, longer) > 0.0; ++more) {
        const int round = probe.longer - probe.shorter;
        probe.shorter = std::exchange(probe.longer, probe.longer + (probe.longer + round - 1) / round * round);
        if (m <= probe.longer) return played(m).estimate;
        shorter = std::exchange(longer, played(probe.longer));
    }
    const search::Estimate &a = shorter.estimate, &b = longer.estimate;
    const double times = static_cast<double>(m - probe.longer) / (probe.longer - probe.shorter);
    search::Estimate e = b;
    e.step_seconds += times * (b.step_seconds - a.step_seconds);
    add_difference(e.breakdown, b.breakdown, a.breakdown, times);
    if (least(e.breakdown) < 0.0) { // Another stage was the slowest of the longer play, so its parts stand as they are.
        e.breakdown = search::Breakdown{};
        add_difference(e.breakdown, b.breakdown, search::Breakdown{}, e.step_seconds / b.step_seconds);
    }
    // A lead that was used up later than was played.
    const double issued = longer.host_seconds + times * (longer.host_seconds - shorter.host_seconds);
    const double late = std::max(0.0, issued + stack.costs.step_seconds - e.step_seconds);
    e.step_seconds += late;
    e.breakdown.host += late;
    return e;
}

constexpr std::int64_t played_whole = 600; // micro-batches times ranks that play in a fraction of a second

} // namespace

search::Estimate FastEstimator::play(const plan::Plan& plan) {
    const stack::Stack& stack = state_->segments.stack();
    const std::int64_t micro_batches = std::int64_t{plan.micro_batches()} * plan.pp; // micro-batches of all ranks
    return priced(plan, micro_batches <= played_whole ? replay::timed(plan, stack, state_->rows).estimate
                                                      : played_by_ops(plan, stack, state_->rows));
}

search::Estimate FastEstimator::priced(const plan::Plan& plan, search::Estimate e) {
    e.memory_bytes = memory_bytes(plan);
    replay::fill_rates(plan, e);
    return e;
}

search::Estimate FastEstimator::estimate(const plan::Plan& plan) {
    if (plan.hardware->cpu) return replay::simulate(plan, state_->segments.stack(), false).estimate;
    if (needs_ops(plan)) return priced(plan, played_by_ops(plan, state_->segments.stack(), state_->rows));
    search::Estimate e;
    const estimate::StepModel model =
        estimate::model_step(state_->segments, state_->shapes.of(plan), plan, state_->orders);
    const std::vector<estimate::RankPlay> plays = extrapolate(plan, model, state_->orders);
    for (const estimate::RankPlay& play : plays) e.step_seconds = std::max(e.step_seconds, play.end + model.per_step);
    e.breakdown = split(state_->segments, plan, model, plays, e.step_seconds);
    return priced(plan, e);
}

std::unique_ptr<search::BoundModel> FastEstimator::bound_model() {
    if (state_->hardware->cpu) return search::Estimator::bound_model();
    return bound::make_bound_model({state_->segments, state_->shapes, state_->orders, state_->library, state_->parts});
}

} // namespace moe::pricing
