// Adds up what the chunks of a plan take, when they use their buckets, and which of them are merged.
#include "simulator/estimate/step_parts.hpp"

#include "planner/lower/emit/builder.hpp"
#include "planner/lower/emit/parameters.hpp"
#include "planner/lower/passes/first_gradients.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/mesh.hpp"
#include "simulator/estimate/bucket_costs.hpp"

#include <algorithm>
#include <numeric>

namespace moe::estimate {
namespace {

// True where the lowering would put both into one bucket, if they were neighbours.
bool like(const passes::BucketSize& a, const passes::BucketSize& b) {
    return a.domain == b.domain && a.group == b.group && a.weight_dtype == b.weight_dtype &&
           a.quantizable == b.quantizable && a.is_muon() == b.is_muon() && a.frozen == b.frozen;
}

} // namespace

std::vector<passes::BucketSize> stage_buckets(SegmentCache& cache, const plan::Plan& plan, const plan::Stage& stage,
                                              const Segments& segments) {
    // Which matrices a shard of Muon touches depends on the order of all.
    if (stage.mtp > 0 || plan.model->tied_embeddings || emit::shares_table(plan) || plan.optimizer.muon)
        return cache.stage_buckets(plan, stage);
    std::vector<passes::BucketSize> sum;
    for (const auto& [id, count] : segments)
        for (const passes::BucketSize& b : cache.buckets(plan, id)) {
            const int size = plan::group_size(plan, b.group);
            auto it = std::find_if(sum.begin(), sum.end(), [&b](const passes::BucketSize& s) { return like(s, b); });
            if (it == sum.end()) {
                it = sum.insert(sum.end(), {b.domain, 0, b.group, size, b.weight_dtype, -1, 0, b.quantizable});
                it->frozen = b.frozen;
            }
            it->elements += b.elements * count;
        }
    return sum;
}

namespace {

// Finds the bucket that each segment's parameters are in, as the lowering cuts them: whole segments in order.
class BucketFiller {
public:
    explicit BucketFiller(const std::vector<passes::BucketSize>& buckets)
        : buckets_(buckets), filled_(buckets.size(), 0) {}

    // Index of the bucket that takes `part`; -1 when the stage has none like it.
    int place(const passes::BucketSize& part) {
        int found = -1;
        for (std::size_t i = 0; i < buckets_.size(); ++i) {
            const passes::BucketSize& b = buckets_[i];
            if (!like(b, part)) continue;
            found = static_cast<int>(i);
            // Parts are padded each: one that does not fit may be too long by its padding only.
            if (filled_[i] + part.elements / 2 <= b.elements) break;
        }
        if (found >= 0) filled_[static_cast<std::size_t>(found)] += part.elements;
        return found;
    }

private:
    const std::vector<passes::BucketSize>& buckets_;
    std::vector<std::int64_t> filled_;
};

// A segment of a chunk, with the index of the bucket behind each of its uses (-1: none).
struct Placed {
    const SegmentCost* cost;
    std::vector<int> buckets;
};

// The buckets of a chunk, and when its forward and backward use them.
std::vector<BucketTime> time_buckets(SegmentCache& cache, const cost::CostModel& costs, const plan::Plan& plan,
                                     const StageShape& shape) {
    const std::vector<passes::BucketSize> sizes =
        plan.pp > 1 ? stage_buckets(cache, plan, shape.stage, shape.segments) : cache.stage_buckets(plan, shape.stage);
    std::vector<std::int64_t> zeroed(sizes.size(), 0); // elements zeroed, by bucket
    std::vector<Placed> segments;
    BucketFiller filler(sizes);
    for (const auto& [id, count] : shape.segments)
        for (int i = 0; i < count; ++i) {
            segments.push_back({&cache.cost(plan, id), {}});
            for (const BucketUse& use : segments.back().cost->uses) {
                const int bucket = filler.place(use.bucket);
                segments.back().buckets.push_back(bucket);
                if (bucket >= 0) zeroed[static_cast<std::size_t>(bucket)] += use.zeroed;
            }
        }
    std::vector<BucketTime> times;
    for (std::size_t i = 0; i < sizes.size(); ++i)
        times.push_back(
            time_of(costs, sizes[i],
                    passes::sets_first_gradients(plan) ? std::min(zeroed[i], sizes[i].elements) : sizes[i].elements));
    const auto each_use = [&times](const Placed& segment, auto&& visit) {
        for (std::size_t i = 0; i < segment.buckets.size(); ++i)
            if (segment.buckets[i] >= 0)
                visit(times[static_cast<std::size_t>(segment.buckets[i])], segment.cost->uses[i]);
    };
    for (const Placed& segment : segments) {
        const replay::MaxPlusMatrix& next = segment.cost->forward.max_plus;
        for (BucketTime& time : times) time.after_weights = next.after(time.after_weights, time.after_weights.device);
        each_use(segment, [](BucketTime& time, const BucketUse& use) {
            time.after_weights = replay::latest(time.after_weights, use.after_weights);
        });
    }
    replay::MaxPlusMatrix so_far;
    const bool alone = plan.micro_batches() == 1; // whether the backward that finishes gradients also sets them
    for (auto segment = segments.rbegin(); segment != segments.rend(); ++segment) {
        const replay::MaxPlusMatrix& first = segment->cost->first_backward.max_plus;
        const replay::MaxPlusMatrix& next = alone ? first : segment->cost->backward.max_plus;
        so_far = segment == segments.rbegin() ? next : so_far.then(next);
        for (BucketTime& time : times) time.after_zero = first.after(time.after_zero, time.after_zero.device);
        each_use(*segment, [&so_far](BucketTime& time, const BucketUse& use) {
            time.after_zero = replay::latest(time.after_zero, use.after_zero);
            time.until_final = so_far; // The first segment is the last to finish.
            for (replay::StreamClocks* from : {&time.until_final.from_host, &time.until_final.from_device,
                                               &time.until_final.from_ring, &time.until_final.from_message})
                from->device -= use.after_final;
        });
    }
    return times;
}

ChunkModel model_chunk(SegmentCache& cache, const cost::CostModel& costs, const plan::Plan& plan,
                       const StageShape& shape) {
    ChunkModel chunk;
    chunk.segments = shape.segments;
    // Each from its first segment on, which is the one that waits for the message.
    for (const auto& [id, count] : chunk.segments)
        for (int i = 0; i < count; ++i) {
            chunk.backward = cache.cost(plan, id).backward.max_plus.then(chunk.backward);
            chunk.first_backward = cache.cost(plan, id).first_backward.max_plus.then(chunk.first_backward);
        }
    for (auto it = chunk.segments.rbegin(); it != chunk.segments.rend(); ++it)
        for (int i = 0; i < it->second; ++i)
            chunk.forward = cache.cost(plan, it->first).forward.max_plus.then(chunk.forward);
    double seconds[2] = {}, compute[2] = {};
    for (const auto& [id, count] : chunk.segments)
        for (const bool back : {false, true}) {
            const SegmentCost& cost = cache.cost(plan, id);
            const SegmentTime& time = back ? cost.backward : cost.forward;
            seconds[back] += count * time.device;
            compute[back] += count * (time.parts.compute + time.parts.recompute);
        }
    for (const bool back : {false, true})
        if (seconds[back] > 0.0) chunk.computes[back] = std::min(1.0, compute[back] / seconds[back]);
    for (const auto& [id, count] : chunk.segments)
        for (int i = 0; i < count; ++i) {
            const SegmentCost& cost = cache.cost(plan, id);
            const replay::StreamClocks before = chunk.after_scales;
            chunk.after_scales = replay::latest(cost.forward.max_plus.after(before, before.device), cost.after_scales);
        }
    chunk.buckets = time_buckets(cache, costs, plan, shape);
    chunk.reductions.resize(chunk.buckets.size());
    std::iota(chunk.reductions.begin(), chunk.reductions.end(), std::size_t{0});
    std::stable_sort(chunk.reductions.begin(), chunk.reductions.end(), [&chunk](std::size_t a, std::size_t b) {
        return chunk.buckets[a].until_final.from_device.device < chunk.buckets[b].until_final.from_device.device;
    });
    return chunk;
}

// The pairs of chunks that the schedule merges.
std::vector<MergedTime> merged_pairs(SegmentCache& cache, const cost::CostModel& costs, const Shape& shape,
                                     const plan::Plan& plan, const StepModel& model, Orders& orders) {
    const std::size_t n = model.chunks.size();
    std::vector<MergedTime> merged(n * n);
    std::vector<bool> known(n * n, false);
    MergedPlayer player(costs);
    const int micro_batches = std::min(plan.micro_batches(), Probe(plan).longer);
    for (int r = 0; r < plan.pp; ++r) {
        const std::vector<plan::Turn>& turns = orders.of(plan, micro_batches, r).turns;
        const std::vector<int>& chunks = model.ranks[static_cast<std::size_t>(r)];
        for (std::size_t i = 0; i + 1 < turns.size(); ++i) {
            if (!turns[i].merged) continue;
            const auto a = static_cast<std::size_t>(chunks[static_cast<std::size_t>(turns[i].chunk)]),
                       b = static_cast<std::size_t>(chunks[static_cast<std::size_t>(turns[i + 1].chunk)]);
            if (known[a * n + b]) continue;
            known[a * n + b] = true;
            merged[a * n + b] = cache.merged(plan, player, shape.distinct[a].segments, shape.distinct[b].segments);
        }
    }
    return merged;
}

} // namespace

namespace {

// Delayed scaling: the reduction of largest magnitudes, of the pipeline rank that has most of them.
double scales_seconds(SegmentCache& cache, const cost::CostModel& costs, const plan::Plan& plan, const Shape& shape,
                      const StepModel& model) {
    if (!plan.keeps_scales() || plan::group_size(plan, emit::groups::stage) == 1) return 0.0;
    int most = 0;
    for (const std::vector<int>& chunks : model.ranks) {
        int operands = 0;
        for (const int chunk : chunks)
            for (const auto& [id, count] : shape.distinct[static_cast<std::size_t>(chunk)].segments)
                operands += count * cache.size(plan, id).scaled;
        most = std::max(most, operands);
    }
    const passes::StepOp op = passes::scales_op(most);
    return price_bytes(costs, op.kind, op.bytes, op.dtype, op.group);
}

} // namespace

StepModel model_step(SegmentCache& cache, const Shape& shape, const plan::Plan& plan, Orders& orders) {
    const cost::CostModel costs(plan, cache.stack(), cache.machine());
    StepModel model;
    for (const StageShape& stage : shape.distinct) model.chunks.push_back(model_chunk(cache, costs, plan, stage));
    model.ranks.resize(static_cast<std::size_t>(plan.pp));
    for (std::size_t s = 0; s < shape.of_stage.size(); ++s)
        model.ranks[s % static_cast<std::size_t>(plan.pp)].push_back(shape.of_stage[s]);
    const program::Dtype dtype = emit::activation_dtype(plan.precision);
    const double bytes = static_cast<double>(program::bytes_of(dtype, plan.tokens_local() * plan.model->hidden));
    if (plan.pp > 1) {
        const cost::OpCost message = price_op(costs, program::OpKind::send, bytes, dtype, emit::groups::pipeline);
        model.message = message.device;
        model.message_launch = message.host;
        model.receive = price_bytes(costs, program::OpKind::recv, bytes, dtype, emit::groups::pipeline);
    }
    model.step_launch = price_op(costs, program::OpKind::zero, 0.0, program::Dtype::f32).host;
    if (const passes::StepOp norm = passes::norm_op(1);
        plan.gpus > 1) // The count of overflowing rows beside it takes no time.
        model.norm = price_bytes(costs, norm.kind, norm.bytes, norm.dtype, norm.group) +
                     scales_seconds(cache, costs, plan, shape, model);
    if (model.table_holders = emit::table_holders(plan); model.table_holders.size() > 1) {
        const double table = passed_table_bytes(plan);
        model.table_message =
            price_bytes(costs, program::OpKind::send, table, emit::gradient_dtype(plan), emit::groups::pipeline);
        model.table_add = price_bytes(costs, program::OpKind::add, 3.0 * table, emit::gradient_dtype(plan));
    }
    model.lost = costs.contention_price().to_collectives;
    model.per_step = cache.stack().costs.step_seconds;
    if (plan.ep_overlap) model.merged = merged_pairs(cache, costs, shape, plan, model, orders);
    return model;
}

std::vector<double> tables_added(const StepModel& model, const std::vector<double>& ready,
                                 const std::vector<double*>& hosts) {
    std::vector<double> done(ready.size(), 0.0);
    const std::size_t n = model.table_holders.size();
    if (n < 2) return done;
    const auto rank = [&](std::size_t i) { return static_cast<std::size_t>(model.table_holders[i]); };
    std::vector<double> here(n), added(n), arrived(n);
    for (std::size_t i = 0; i < n; ++i) here[i] = added[i] = ready[rank(i)];
    for (std::size_t step = 0; step + 1 < n; ++step) {
        for (std::size_t i = 0; i < n; ++i)
            arrived[(i + 1) % n] = std::max(here[i], *hosts[rank(i)]) + model.table_message;
        for (std::size_t i = 0; i < n; ++i) {
            double& host = *hosts[rank(i)];
            host += 3.0 * model.step_launch; // launches of the send, receive and add
            added[i] = std::max({added[i], arrived[i], host - model.step_launch}) + model.table_add;
        }
        here = arrived;
    }
    for (std::size_t i = 0; i < n; ++i) done[rank(i)] = added[i];
    return done;
}

} // namespace moe::estimate
