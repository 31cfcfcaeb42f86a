// How layers and batch are cut into stages: what each stage holds of parameters, keeps of its layers, and moves as a
// step begins and ends.
#include "simulator/bound/bound_model.hpp"

#include "planner/lower/emit/builder.hpp"
#include "planner/lower/passes/first_gradients.hpp"
#include "planner/memory/library_memory.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/mesh.hpp"
#include "simulator/estimate/bucket_costs.hpp"

#include <algorithm>
#include <tuple>

namespace moe {
namespace {

// Seconds in which so many bytes of a rank's optimizer states come from the host and go back, one after the other.
double visit_seconds(const CostModel& costs, double bytes) {
    if (bytes == 0.0) return 0.0;
    return price_bytes(costs, OpKind::copy_from_host, bytes, Dtype::f32) +
           price_bytes(costs, OpKind::copy_to_host, bytes, Dtype::f32);
}

// Buckets of one group, and how many elements each segment of a part has in them.
struct Gathered {
    BucketSize all;
    std::vector<std::pair<int, std::int64_t>> parts;
};

} // namespace

int FastQuoter::stages(const Plan& plan) {
    list_segments(plan.model);
    const PlanKey<Subject::cut> key(plan);
    auto known = known_stages_.find(key);
    if (known == known_stages_.end()) { // what is refused here leaves no entry behind
        // Without what layers alone depend on: who asks first must not matter.
        auto found = std::make_unique<Stages>(stages_of(only<Subject::cut>(plan)));
        known = known_stages_.emplace(key, std::move(found)).first;
    }
    stages_.push_back(known->second.get());
    return static_cast<int>(stages_.size()) - 1;
}

FastQuoter::Stages FastQuoter::stages_of(const Plan& plan) {
    Stages result;
    result.plan = plan;
    result.shape = &sources_.shapes.of(plan);
    const CostModel costs(plan, sources_.segments.stack(), sources_.segments.machine());
    result.lost = costs.beside_communication().to_collectives;
    std::vector<double> update, squares, zeroed, visits;
    result.moved.resize(result.shape->distinct.size());
    if (!plan.reshards())
        for (int r = 0; r < plan.pp; ++r) {
            const auto d = static_cast<std::size_t>(
                result.shape->of_stage[static_cast<std::size_t>(stage_of(plan.schedule, plan.pp, r, 0))]);
            if (result.moved[d].empty()) result.moved[d] = moved_of(plan, costs, result.shape->distinct[d]);
        }
    for (const StageShape& stage : result.shape->distinct) {
        std::vector<std::pair<int, int>> parts;
        for (const auto& [id, count] : stage.segments) {
            parts.emplace_back(segment(id), count);
            result.rare = result.rare || counts_[static_cast<std::size_t>(parts.back().first)] == 0;
        }
        result.parts.push_back(std::move(parts));
        StageMemory memory;
        double updated = 0.0, summed = 0.0, zero = 0.0;
        for (const BucketSize& b : buckets(plan, stage.stage, stage.segments)) {
            memory.add_states(plan, b);
            memory.groups |= group_bit(b.group);
            updated += step_op(plan, b, StepWork::update).bytes;
            summed += step_op(plan, b, StepWork::square).bytes;
            // Where products set gradients what is left is little: embeddings, norms and biases.
            if (!is_quantized(b.weight_dtype) && !plan.reshards() && !sets_first_gradients(plan))
                zero += step_op(plan, b, StepWork::zero).bytes;
        }
        if (plan.reshards() && stage.stage.mtp > 0) { // the LM head's gathered weights, which MTP reads as well
            Stage head;
            head.loss = true;
            for (const BucketSize& b : buckets(plan, head, {{{SegmentKind::head, 0}, 1}}))
                if (b.group_size > 1) memory.counted_twice += stage.stage.mtp * weight_bytes(b);
        }
        memory.add_tables(plan, stage.stage);
        if (stage.stage.loss && plan.dp * plan.cp > 1) memory.groups |= group_bit(groups::samples);
        result.memory.push_back(memory);
        update.push_back(updated);
        visits.push_back(memory.visiting);
        squares.push_back(summed);
        zeroed.push_back(zero);
    }
    const auto rank_sum = [&](const std::vector<double>& of, int rank) {
        double sum = 0.0;
        for (int c = 0; c < plan.vpp; ++c)
            sum += of[static_cast<std::size_t>(
                result.shape->of_stage[static_cast<std::size_t>(stage_of(plan.schedule, plan.pp, rank, c))])];
        return sum;
    };
    double most = 0.0;
    for (int r = 0; r < plan.pp; ++r) most = std::max(most, rank_sum(update, r));
    const auto seconds = [&](OpKind kind, double bytes) {
        return bytes > 0.0 ? price_bytes(costs, kind, bytes, Dtype::f32) : 0.0;
    };
    result.zero = seconds(OpKind::zero, rank_sum(zeroed, 0));
    double visiting = 0.0; // of the fullest rank
    for (int r = 0; r < plan.pp; ++r) visiting = std::max(visiting, rank_sum(visits, r));
    result.closing = std::max(seconds(OpKind::adamw, most), visit_seconds(costs, visiting)) +
                     seconds(OpKind::sum_squares, rank_sum(squares, 0)) + sources_.segments.stack().costs.step_seconds;
    if (plan.pp > 1) {
        constexpr double far = 1e9; // bytes
        result.message_start = price_bytes(costs, OpKind::send, 0.0, Dtype::bf16, groups::pipeline);
        result.message_per_byte =
            (price_bytes(costs, OpKind::send, far, Dtype::bf16, groups::pipeline) - result.message_start) / far;
    }
    return result;
}

// Layers share no parameters, so a stage's buckets are those of its layers and those of its ends.
std::vector<BucketSize> FastQuoter::buckets(const Plan& plan, const Stage& stage, const Segments& segments) {
    Stage ends = stage;
    ends.first_layer = ends.layers = 0;
    std::vector<BucketSize> sizes;
    if (ends.embedding || ends.loss || ends.mtp > 0) sizes = sources_.segments.stage_buckets(plan, ends);
    for (const auto& [id, count] : segments) {
        if (id.kind != SegmentKind::layer) continue;
        for (BucketSize b : sources_.segments.buckets(plan, id)) {
            b.elements *= count;
            b.group_size = group_size(plan, b.group);
            sizes.push_back(b);
        }
    }
    return sizes;
}

std::vector<FastQuoter::Moved> FastQuoter::moved_of(const Plan& plan, const CostModel& costs, const StageShape& shape) {
    // What layers share with others counts nowhere.
    const bool shares = !plan.model->mtp.empty() || plan.model->tied_embeddings;
    std::vector<Gathered> gathered;
    for (std::size_t p = 0; p < shape.segments.size(); ++p) {
        const auto& [id, count] = shape.segments[p];
        if (is_mtp(id.kind) || (shares && id.kind != SegmentKind::layer)) continue;
        for (const BucketSize& b : sources_.segments.buckets(plan, id)) {
            auto it = std::find_if(gathered.begin(), gathered.end(), [&b](const Gathered& g) {
                return std::tie(g.all.group, g.all.weight_dtype) == std::tie(b.group, b.weight_dtype);
            });
            if (it == gathered.end()) {
                it = gathered.insert(it, {b, {}});
                it->all.elements = it->all.matrices = 0;
                it->all.group_size = group_size(plan, b.group);
            }
            it->all.elements += count * b.elements;
            it->parts.emplace_back(static_cast<int>(p), b.elements);
        }
    }
    std::vector<Moved> result;
    for (const Gathered& g : gathered) {
        const double quantize = seconds_of(costs, g.all, StepWork::quantize),
                     gather = seconds_of(costs, g.all, StepWork::gather) + quantize,
                     reduce = seconds_of(costs, g.all, StepWork::reduce);
        if (gather == 0.0) continue;
        if (plan.pp > 1) {
            result.push_back({g.parts.front().first, 1, gather, reduce, quantize});
            continue;
        }
        for (const auto& [part, elements] : g.parts) {
            const double share = static_cast<double>(elements) / static_cast<double>(g.all.elements);
            const int count = shape.segments[static_cast<std::size_t>(part)].second;
            const auto add = [&](int segments, double times) {
                result.push_back({part, segments, times * gather, times * reduce, times * quantize});
            };
            add(1, share);
            add(count, (count - 1) * share);
        }
    }
    std::sort(result.begin(), result.end(), [](const Moved& a, const Moved& b) {
        return std::tie(a.part, a.segments) < std::tie(b.part, b.segments);
    });
    return result;
}

StageMemory FastQuoter::whole_model(const Plan& plan) {
    list_segments(plan.model);
    Segments layers;
    for (std::size_t i = 0; i < segments_.size(); ++i)
        if (segments_[i].kind == SegmentKind::layer) layers.emplace_back(segments_[i], counts_[i]);
    Stage ends;
    ends.embedding = ends.loss = true;
    ends.mtp = static_cast<int>(plan.model->mtp.size());
    StageMemory all;
    for (const BucketSize& b : buckets(plan, ends, layers)) all.add_states(plan, b);
    return all;
}

double FastQuoter::least_bytes(const Plan& plan) {
    const StageMemory all = whole_model(plan);
    return (all.states + all.visiting) / plan.pp + library_memory(plan);
}

double FastQuoter::least_visit(const Plan& plan) {
    if ((plan.offload & offload::optimizer) == 0) return 0.0;
    const CostModel costs(plan, sources_.segments.stack(), sources_.segments.machine());
    return visit_seconds(costs, whole_model(plan).visiting / plan.pp);
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

} // namespace moe
