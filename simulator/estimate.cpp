// Builds the step model of a plan from cached segments and buckets, plays a few groups of micro-batches and
// extrapolates.
#include "simulator/estimate.hpp"

#include "planner/builder.hpp"
#include "planner/error.hpp"
#include "simulator/bucket_costs.hpp"
#include "simulator/quote.hpp"
#include "simulator/simulate.hpp"
#include "simulator/stage_memory.hpp"

#include <algorithm>
#include <numeric>

namespace moe {

struct FastEstimator::State {
    State(std::shared_ptr<const Hardware> h, Stack s) : hardware(std::move(h)), segments(*hardware, std::move(s)) {}
    std::shared_ptr<const Hardware> hardware;
    SegmentCache segments;
    Shapes shapes;
    Orders orders;
    FlatLibrary library;
    PartFloors parts;
};

namespace {

void add_parts(Breakdown& sum, const Breakdown& part, double times) {
    sum.compute += times * part.compute;
    sum.tensor += times * part.tensor;
    sum.context += times * part.context;
    sum.expert += times * part.expert;
    sum.data += times * part.data;
    sum.recompute += times * part.recompute;
    sum.host += times * (part.host + part.bubble);
}

constexpr double Breakdown::*all_parts[] = {
    &Breakdown::compute, &Breakdown::tensor, &Breakdown::context,   &Breakdown::expert,    &Breakdown::pipeline,
    &Breakdown::bubble,  &Breakdown::data,   &Breakdown::optimizer, &Breakdown::recompute, &Breakdown::host};

void add_difference(Breakdown& sum, const Breakdown& more, const Breakdown& less, double times) {
    for (const auto part : all_parts) sum.*part += times * (more.*part - less.*part);
}

double least(const Breakdown& b) {
    double part = b.compute;
    for (const auto other : all_parts) part = std::min(part, b.*other);
    return part;
}

// Buckets of a stage of several. A bucket holds a whole chunk, so those of the segments add up, except where an MTP
// layer shares embedding or head with its neighbours.
std::vector<BucketSize> stage_buckets(SegmentCache& cache, const Plan& plan, const Stage& stage,
                                      const Segments& segments) {
    if (stage.mtp > 0 || plan.model->tied_embeddings || shares_table(plan)) return cache.stage_buckets(plan, stage);
    std::vector<BucketSize> sum;
    for (const auto& [id, count] : segments)
        for (const BucketSize& b : cache.buckets(plan, id)) {
            const int size = group_size(plan, b.group);
            auto it = std::find_if(sum.begin(), sum.end(), [&](const BucketSize& s) {
                return s.domain == b.domain && s.group == b.group && s.weight_dtype == b.weight_dtype;
            });
            if (it == sum.end()) it = sum.insert(sum.end(), {b.domain, 0, b.group, size, b.weight_dtype});
            it->elements += b.elements * count;
        }
    return sum;
}

// Finds the bucket that each segment's parameters are in, as the lowering cuts them: whole segments in order.
class BucketFiller {
public:
    explicit BucketFiller(const std::vector<BucketSize>& buckets) : buckets_(buckets), filled_(buckets.size(), 0) {}

    // Index of the bucket that takes `part`; -1 when the stage has none like it.
    int place(const BucketSize& part) {
        int found = -1;
        for (std::size_t i = 0; i < buckets_.size(); ++i) {
            const BucketSize& b = buckets_[i];
            if (b.domain != part.domain || b.group != part.group || b.weight_dtype != part.weight_dtype) continue;
            found = static_cast<int>(i);
            // Parts are padded each: one that does not fit may be too long by its padding only.
            if (filled_[i] + part.elements / 2 <= b.elements) break;
        }
        if (found >= 0) filled_[static_cast<std::size_t>(found)] += part.elements;
        return found;
    }

private:
    const std::vector<BucketSize>& buckets_;
    std::vector<std::int64_t> filled_;
};

// A segment of a chunk, with the index of the bucket behind each of its uses (-1: none).
struct Placed {
    const SegmentCost* cost;
    std::vector<int> buckets;
};

// The buckets of a chunk, and when its forward and backward use them.
std::vector<BucketTime> time_buckets(SegmentCache& cache, const CostModel& costs, const Plan& plan,
                                     const StageShape& shape) {
    const std::vector<BucketSize> sizes =
        plan.pp > 1 ? stage_buckets(cache, plan, shape.stage, shape.segments) : cache.stage_buckets(plan, shape.stage);
    std::vector<BucketTime> times;
    for (const BucketSize& size : sizes) times.push_back(time_of(costs, size));
    std::vector<Placed> segments;
    BucketFiller filler(sizes);
    for (const auto& [id, count] : shape.segments)
        for (int i = 0; i < count; ++i) {
            segments.push_back({&cache.cost(plan, id), {}});
            for (const BucketUse& use : segments.back().cost->uses)
                segments.back().buckets.push_back(filler.place(use.bucket));
        }
    const auto each_use = [&times](const Placed& segment, auto&& visit) {
        for (std::size_t i = 0; i < segment.buckets.size(); ++i)
            if (segment.buckets[i] >= 0)
                visit(times[static_cast<std::size_t>(segment.buckets[i])], segment.cost->uses[i]);
    };
    for (const Placed& segment : segments) {
        const Passage& next = segment.cost->forward.passage;
        for (BucketTime& time : times) time.after_weights = next.after(time.after_weights, time.after_weights.device);
        each_use(segment, [](BucketTime& time, const BucketUse& use) {
            time.after_weights = latest(time.after_weights, use.after_weights);
        });
    }
    Passage so_far;
    for (auto segment = segments.rbegin(); segment != segments.rend(); ++segment) {
        const Passage& next = segment->cost->backward.passage;
        so_far = segment == segments.rbegin() ? next : so_far.then(next);
        for (BucketTime& time : times) time.after_zero = next.after(time.after_zero, time.after_zero.device);
        each_use(*segment, [&so_far](BucketTime& time, const BucketUse& use) {
            time.after_zero = latest(time.after_zero, use.after_zero);
            time.until_final = so_far; // the first segment is the last to finish
            for (Clocks* from : {&time.until_final.from_host, &time.until_final.from_device,
                                 &time.until_final.from_ring, &time.until_final.from_message})
                from->device -= use.after_final;
        });
    }
    return times;
}

ChunkModel model_chunk(SegmentCache& cache, const CostModel& costs, const Plan& plan, const StageShape& shape) {
    ChunkModel chunk;
    chunk.segments = shape.segments;
    // Each from its first segment on, which is the one that waits for the message.
    for (const auto& [id, count] : chunk.segments)
        for (int i = 0; i < count; ++i) chunk.backward = cache.cost(plan, id).backward.passage.then(chunk.backward);
    for (auto it = chunk.segments.rbegin(); it != chunk.segments.rend(); ++it)
        for (int i = 0; i < it->second; ++i)
            chunk.forward = cache.cost(plan, it->first).forward.passage.then(chunk.forward);
    chunk.buckets = time_buckets(cache, costs, plan, shape);
    chunk.reductions.resize(chunk.buckets.size());
    std::iota(chunk.reductions.begin(), chunk.reductions.end(), std::size_t{0});
    std::stable_sort(chunk.reductions.begin(), chunk.reductions.end(), [&chunk](std::size_t a, std::size_t b) {
        return chunk.buckets[a].until_final.from_device.device < chunk.buckets[b].until_final.from_device.device;
    });
    return chunk;
}

// Micro-batches to play of a plan that has many: two numbers, from which the rest follows linearly.
struct Probe {
    int shorter, longer;
    explicit Probe(const Plan& plan)
        : shorter(3 * plan.pp + plan.micro_batches() % plan.pp), longer(shorter + plan.pp) {}
};

// The pairs of chunks that the schedule merges.
std::vector<MergedTime> merged_pairs(SegmentCache& cache, const CostModel& costs, const Shape& shape, const Plan& plan,
                                     const StepModel& model, Orders& orders) {
    const std::size_t n = model.chunks.size();
    std::vector<MergedTime> merged(n * n);
    std::vector<bool> known(n * n, false);
    MergedPlayer player(costs);
    const int micro_batches = std::min(plan.micro_batches(), Probe(plan).longer);
    for (int r = 0; r < plan.pp; ++r) {
        const std::vector<Turn>& turns = orders.of(plan, micro_batches, r).turns;
        const std::vector<int>& chunks = model.ranks[static_cast<std::size_t>(r)];
        for (std::size_t i = 0; i + 1 < turns.size(); ++i) {
            if (!turns[i].forward() || turns[i + 1].forward()) continue;
            const auto a = static_cast<std::size_t>(chunks[static_cast<std::size_t>(turns[i].chunk)]),
                       b = static_cast<std::size_t>(chunks[static_cast<std::size_t>(turns[i + 1].chunk)]);
            if (known[a * n + b]) continue;
            known[a * n + b] = true;
            merged[a * n + b] = cache.merged(plan, player, shape.distinct[a].segments, shape.distinct[b].segments);
        }
    }
    return merged;
}

StepModel model_step(SegmentCache& cache, const Shape& shape, const Plan& plan, Orders& orders) {
    const CostModel costs(plan, cache.stack(), cache.routes());
    StepModel model;
    for (const StageShape& stage : shape.distinct) model.chunks.push_back(model_chunk(cache, costs, plan, stage));
    model.ranks.resize(static_cast<std::size_t>(plan.pp));
    for (std::size_t s = 0; s < shape.of_stage.size(); ++s)
        model.ranks[s % static_cast<std::size_t>(plan.pp)].push_back(shape.of_stage[s]);
    const Dtype dtype = activation_dtype(plan.precision);
    const double bytes = static_cast<double>(bytes_of(dtype, plan.tokens_local() * plan.model->hidden));
    if (plan.pp > 1) {
        const OpCost message = price_op(costs, OpKind::send, bytes, dtype, groups::pipeline);
        model.message = message.device;
        model.message_launch = message.host;
        model.receive = price_bytes(costs, OpKind::recv, bytes, dtype, groups::pipeline);
    }
    model.step_launch = price_op(costs, OpKind::zero, 0.0, Dtype::f32).host;
    if (plan.gpus > 1) model.norm = price_bytes(costs, OpKind::all_reduce, 4.0, Dtype::f32, groups::world);
    if (model.table_holders = table_holders(plan); model.table_holders.size() > 1) {
        const double table = gradient_bytes(plan) * static_cast<double>(plan.model->padded_vocab(plan.tp) / plan.tp) *
                             static_cast<double>(plan.model->hidden);
        model.table_message = price_bytes(costs, OpKind::send, table, gradient_dtype(plan), groups::pipeline);
        model.table_add = price_bytes(costs, OpKind::add, 3.0 * table, gradient_dtype(plan));
    }
    model.per_step = cache.stack().costs.step_seconds;
    if (plan.ep_overlap) model.merged = merged_pairs(cache, costs, shape, plan, model, orders);
    return model;
}

// The last rank to end, as simulate() chooses it.
std::size_t slowest(const std::vector<RankPlay>& plays) {
    std::size_t worst = 0;
    for (std::size_t r = 1; r < plays.size(); ++r)
        if (plays[r].end > plays[worst].end) worst = r;
    return worst;
}

Breakdown split(SegmentCache& cache, const Plan& plan, const StepModel& model, std::size_t rank, const RankPlay& play,
                double step) {
    Breakdown sum;
    for (const int c : model.ranks[rank])
        for (const auto& [id, count] : model.chunks[static_cast<std::size_t>(c)].segments) {
            const SegmentCost& cost = cache.cost(plan, id);
            const double times = static_cast<double>(count) * plan.micro_batches();
            add_parts(sum, cost.forward.parts, times);
            add_parts(sum, cost.backward.parts, times);
        }
    // What overlap saves is exposed dispatch and combine; anything beyond that was waiting inside the slots.
    const double hidden = std::min(play.saved, sum.expert);
    sum.expert -= hidden;
    sum.host = std::max(0.0, sum.host + play.host + model.per_step - (play.saved - hidden));
    sum.data += play.data;
    sum.optimizer = play.optimizer;
    const double known =
        sum.compute + sum.tensor + sum.context + sum.expert + sum.data + sum.optimizer + sum.recompute + sum.host;
    sum.bubble = step - known;
    if (sum.bubble < 0.0) { // rounding of the extrapolation: shrink what is estimated rather than report negative time
        const double scale = step / known;
        for (double* part : {&sum.compute, &sum.tensor, &sum.context, &sum.expert, &sum.data, &sum.optimizer,
                             &sum.recompute, &sum.host})
            *part *= scale;
        sum.bubble = 0.0;
    }
    return sum;
}

// Seconds that the busiest rank computes for `micro_batches`: a long step grows by no less, even where the few
// micro-batches that were played still ran ahead of that rank.
double busiest(const StepModel& model, int micro_batches) {
    double most = 0.0;
    for (const std::vector<int>& chunks : model.ranks) {
        double sum = 0.0;
        for (const int c : chunks) {
            const ChunkModel& chunk = model.chunks[static_cast<std::size_t>(c)];
            sum += chunk.forward.from_device.device + chunk.backward.from_device.device;
        }
        most = std::max(most, sum * micro_batches);
    }
    return most;
}

std::vector<RankPlay> extrapolate(const Plan& plan, const StepModel& model, Orders& orders) {
    const int m = plan.micro_batches();
    const auto [shorter, longer] = Probe(plan);
    if (m <= longer) return play_step(plan, model, orders, m);
    std::vector<RankPlay> a = play_step(plan, model, orders, shorter), b = play_step(plan, model, orders, longer);
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
    for (RankPlay& play : b) {
        play.end += late;
        play.host += late;
    }
    return b;
}

} // namespace

FastEstimator::FastEstimator(std::shared_ptr<const Hardware> hardware, Stack stack)
    : state_(std::make_unique<State>(std::move(hardware), std::move(stack))) {}
FastEstimator::~FastEstimator() = default;

namespace {

StageMemory stage_memory(SegmentCache& cache, const Plan& plan, const StageShape& shape, SavedSegments& saved) {
    StageMemory m;
    int layers = 0;
    for (const auto& [id, count] : shape.segments) {
        const SegmentSize segment = cache.size(plan, id);
        const bool end = id.kind == SegmentKind::embedding || id.kind == SegmentKind::head;
        if (segment.memory.saved > 0) {
            saved.insert(end ? saved.end() : saved.begin() + layers, static_cast<std::size_t>(count),
                         segment.memory.saved);
            if (!end) layers += count;
        }
        m.workspace.forward = std::max(m.workspace.forward, segment.memory.forward);
        m.workspace.backward = std::max(m.workspace.backward, segment.memory.backward);
        m.groups |= segment.groups;
    }
    if (plan.reshards()) {
        const ReshardedMemory resharded = resharded_memory(cache, plan, shape.segments);
        m.workspace = resharded.workspace;
        m.counted_twice = static_cast<double>(resharded.counted_twice);
    }
    for (const BucketSize& b : stage_buckets(cache, plan, shape.stage, shape.segments)) {
        m.add_states(plan, b);
        m.groups |= group_bit(b.group);
    }
    if (shape.stage.loss && plan.dp * plan.cp > 1) m.groups |= group_bit(groups::samples);
    return m;
}

// Backwards of two slots keep some of what a layer saves for the first and some for the second: liveness tells.
double laid_out(const Plan& plan) {
    Plan enough = plan;
    enough.gbs = plan.mbs * plan.dp * enough_micro_batches(plan);
    // Ids and labels of the others.
    const double inputs = 4.0 * (2.0 + static_cast<double>(plan.model->mtp.size())) *
                          static_cast<double>(plan.tokens_gathered()) * (plan.micro_batches() - enough.micro_batches());
    double worst = 0.0;
    for (int rank = 0; rank < plan.pp; ++rank) {
        const Program program = lower(enough, rank);
        worst = std::max(worst, rank_memory_bytes(plan, program, plan_memory(program).arena_bytes));
    }
    return (worst + inputs) * (plan.hardware->cpu ? plan.gpus : 1);
}

} // namespace

double FastEstimator::memory_bytes(const Plan& plan) {
    if (splits_backward(plan.schedule)) return laid_out(plan);
    const Shape& shape = state_->shapes.of(plan);
    std::vector<StageMemory> stages;
    std::vector<SavedSegments> segments(shape.distinct.size());
    for (std::size_t i = 0; i < segments.size(); ++i)
        stages.push_back(stage_memory(state_->segments, plan, shape.distinct[i], segments[i]));
    const int enough = enough_micro_batches(plan);
    std::vector<double> saved;
    for (int r = 0; r < plan.pp; ++r) {
        std::vector<const SavedSegments*> chunks;
        for (int c = 0; c < plan.vpp; ++c)
            chunks.push_back(
                &segments[static_cast<std::size_t>(shape.of_stage[static_cast<std::size_t>(c * plan.pp + r)])]);
        saved.push_back(0.0);
        for (const auto& [bytes, most] : most_kept(chunks, state_->orders.of(plan, enough, r).kept))
            saved.back() += static_cast<double>(bytes) * most;
    }
    return peak_bytes(plan, stages, shape.of_stage, saved);
}

namespace {

// Plans whose work does not fall into slots of fixed length: weights that come under the layer before (FSDP),
// activations that share one link to the host, messages that leave before their slot ends, backwards of two slots, and
// pipelines that are never full, which show every slot's beginning.
bool needs_ops(const Plan& plan) {
    return plan.micro_batches() < plan.pp || plan.reshards() || (plan.offload & ~offload::optimizer) != 0 ||
           plan.delay_wgrad || splits_backward(plan.schedule);
}

// Such plans are played op by op, for two numbers of micro-batches, from which the rest follows linearly.
Estimate played_by_ops(const Plan& plan, const Stack& stack) {
    Plan few = plan;
    const auto played = [&](int micro_batches) {
        few.gbs = plan.mbs * plan.dp * micro_batches;
        return simulate(few, stack, false);
    };
    Probe probe(plan);
    if (plan.pp == 1) probe.shorter = 2, probe.longer = 3;
    const int m = plan.micro_batches();
    if (m <= probe.longer) return played(m).estimate;
    const Simulation shorter = played(probe.shorter), longer = played(probe.longer);
    const Estimate &a = shorter.estimate, &b = longer.estimate;
    const double times = static_cast<double>(m - probe.longer) / (probe.longer - probe.shorter);
    Estimate e = b;
    e.step_seconds += times * (b.step_seconds - a.step_seconds);
    add_difference(e.breakdown, b.breakdown, a.breakdown, times);
    if (least(e.breakdown) < 0.0) { // another stage was the slowest of the longer play: its parts as they are
        e.breakdown = Breakdown{};
        add_difference(e.breakdown, b.breakdown, Breakdown{}, e.step_seconds / b.step_seconds);
    }
    // The lead that a host had from the start (weights being gathered) may be used up only later than was played.
    const double issued = longer.host_seconds + times * (longer.host_seconds - shorter.host_seconds);
    const double late = std::max(0.0, issued + stack.costs.step_seconds - e.step_seconds);
    e.step_seconds += late;
    e.breakdown.host += late;
    return e;
}

} // namespace

Estimate FastEstimator::estimate(const Plan& plan) {
    if (plan.hardware->cpu) return simulate(plan, state_->segments.stack(), false).estimate;
    if (needs_ops(plan)) {
        Estimate e = played_by_ops(plan, state_->segments.stack());
        e.memory_bytes = memory_bytes(plan);
        fill_rates(plan, e);
        return e;
    }
    Estimate e;
    const StepModel model = model_step(state_->segments, state_->shapes.of(plan), plan, state_->orders);
    const std::vector<RankPlay> plays = extrapolate(plan, model, state_->orders);
    const std::size_t worst = slowest(plays);
    e.step_seconds = plays[worst].end + model.per_step;
    e.breakdown = split(state_->segments, plan, model, worst, plays[worst], e.step_seconds);
    e.memory_bytes = memory_bytes(plan);
    fill_rates(plan, e);
    return e;
}

std::unique_ptr<Quoter> FastEstimator::quoter() {
    if (state_->hardware->cpu) return Estimator::quoter();
    return make_quoter({state_->segments, state_->shapes, state_->orders, state_->library,
                        state_->parts});
}

} // namespace moe
