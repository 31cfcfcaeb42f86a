// The cut of layers and batch into stages: what each stage holds of parameters, keeps of its layers, and moves as a
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

namespace moe::bound {
namespace {

// Seconds in which so many bytes of a rank's optimizer states come from the host and go back, one after the other.
double visit_seconds(const cost::CostModel& costs, double bytes) {
    if (bytes == 0.0) return 0.0;
    return estimate::price_bytes(costs, program::OpKind::copy_from_host, bytes, program::Dtype::f32) +
           estimate::price_bytes(costs, program::OpKind::copy_to_host, bytes, program::Dtype::f32);
}

// Buckets of one group, and how many elements each segment of a part has in them.
struct Gathered {
    passes::BucketSize all;
    std::vector<std::pair<int, std::int64_t>> parts;
};

} // namespace

int FastBoundModel::stage_split(const plan::Plan& plan) {
    list_segments(plan.model);
    const plan::PlanKey<plan::Subject::cut> key(plan);
    auto known = known_stages_.find(key);
    if (known == known_stages_.end()) { // Refused stages leave no entry behind.
        // Fields on which layers alone depend stay out: who asks first must not matter.
        auto found = std::make_unique<Stages>(stages_of(plan::only<plan::Subject::cut>(plan)));
        known = known_stages_.emplace(key, std::move(found)).first;
    }
    stages_.push_back(known->second.get());
    return static_cast<int>(stages_.size()) - 1;
}

FastBoundModel::Stages FastBoundModel::stages_of(const plan::Plan& plan) {
    Stages result;
    result.plan = plan;
    result.mesh.emplace(plan);
    result.shape = &sources_.shapes.of(plan);
    const cost::CostModel costs(plan, sources_.segments.stack(), sources_.segments.machine());
    result.lost = costs.contention_price().to_collectives;
    std::vector<double> update, squares, zeroed, visits;
    result.moved.resize(result.shape->distinct.size());
    if (!plan.reshards())
        for (int r = 0; r < plan.pp; ++r) {
            const auto d = static_cast<std::size_t>(
                result.shape->of_stage[static_cast<std::size_t>(plan::stage_of(plan.schedule, plan.pp, r, 0))]);
            if (result.moved[d].empty()) result.moved[d] = moved_of(plan, costs, result.shape->distinct[d]);
        }
    for (const estimate::StageShape& stage : result.shape->distinct) {
        std::vector<std::pair<int, int>> parts;
        for (const auto& [id, count] : stage.segments) {
            parts.emplace_back(segment(id), count);
            result.rare = result.rare || counts_[static_cast<std::size_t>(parts.back().first)] == 0;
        }
        result.parts.push_back(std::move(parts));
        estimate::StageMemory memory;
        double updated = 0.0, summed = 0.0, zero = 0.0;
        for (const passes::BucketSize& b : buckets(plan, stage.stage, stage.segments)) {
            memory.add_states(plan, b);
            memory.groups |= estimate::group_bit(b.group);
            if (b.is_muon() && b.parts > 1) memory.groups |= estimate::group_bit({b.domain, b.cut});
            if (b.frozen) continue;
            // Muon's buckets are left out: what they take by themselves is no part of AdamW's family.
            if (!b.is_muon()) updated += passes::step_op(plan, b, passes::StepWork::update).bytes;
            summed += passes::step_op(plan, b, passes::StepWork::square).bytes;
            // Little is left where products set gradients: embeddings, norms and biases.
            if (!program::is_quantized(b.weight_dtype) && !plan.reshards() && !passes::sets_first_gradients(plan))
                zero += passes::step_op(plan, b, passes::StepWork::zero).bytes;
        }
        if (plan.reshards() && stage.stage.mtp > 0) { // MTP reads the LM head's gathered weights as well.
            plan::Stage head;
            head.loss = true;
            for (const passes::BucketSize& b : buckets(plan, head, {{{lower::SegmentKind::head, 0}, 1}}))
                if (b.group_size > 1) memory.counted_twice += stage.stage.mtp * passes::weight_bytes(b);
        }
        memory.add_tables(plan, stage.stage);
        if (stage.stage.loss && plan.dp * plan.cp > 1) memory.groups |= estimate::group_bit(emit::groups::samples);
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
                result.shape->of_stage[static_cast<std::size_t>(plan::stage_of(plan.schedule, plan.pp, rank, c))])];
        return sum;
    };
    double most = 0.0;
    for (int r = 0; r < plan.pp; ++r) most = std::max(most, rank_sum(update, r));
    const auto seconds = [&](program::OpKind kind, double bytes) {
        return bytes > 0.0 ? estimate::price_bytes(costs, kind, bytes, program::Dtype::f32) : 0.0;
    };
    result.zero = seconds(program::OpKind::zero, rank_sum(zeroed, 0));
    double visiting = 0.0; // bytes of the fullest rank
    for (int r = 0; r < plan.pp; ++r) visiting = std::max(visiting, rank_sum(visits, r));
    result.closing = std::max(seconds(program::OpKind::adamw, most), visit_seconds(costs, visiting)) +
                     seconds(program::OpKind::sum_squares, rank_sum(squares, 0)) +
                     sources_.segments.stack().costs.step_seconds;
    if (plan.pp > 1) {
        constexpr double far = 1e9; // bytes of a long message
        result.message_start =
            estimate::price_bytes(costs, program::OpKind::send, 0.0, program::Dtype::bf16, emit::groups::pipeline);
        result.message_per_byte =
            (estimate::price_bytes(costs, program::OpKind::send, far, program::Dtype::bf16, emit::groups::pipeline) -
             result.message_start) /
            far;
    }
    return result;
}

// Layers share no parameters, so a stage's buckets are those of its layers and those of its ends.
std::vector<passes::BucketSize> FastBoundModel::buckets(const plan::Plan& plan, const plan::Stage& stage,
                                                        const estimate::Segments& segments) {
    plan::Stage ends = stage;
    ends.first_layer = ends.layers = 0;
    std::vector<passes::BucketSize> sizes;
    if (ends.embedding || ends.loss || ends.mtp > 0) sizes = sources_.segments.stage_buckets(plan, ends);
    for (const auto& [id, count] : segments) {
        if (id.kind != lower::SegmentKind::layer) continue;
        for (passes::BucketSize b : sources_.segments.buckets(plan, id)) {
            b.elements *= count;
            b.muon_bytes = 0; // Real buckets are cut elsewhere.
            b.group_size = plan::group_size(plan, b.group);
            sizes.push_back(b);
        }
    }
    return sizes;
}

std::vector<FastBoundModel::Moved> FastBoundModel::moved_of(const plan::Plan& plan, const cost::CostModel& costs,
                                                            const estimate::StageShape& shape) {
    // Weights that layers share with others count nowhere.
    const bool shares = !plan.model->mtp.empty() || plan.model->tied_embeddings;
    std::vector<Gathered> gathered;
    for (std::size_t p = 0; p < shape.segments.size(); ++p) {
        const auto& [id, count] = shape.segments[p];
        if (lower::is_mtp(id.kind) || (shares && id.kind != lower::SegmentKind::layer)) continue;
        for (const passes::BucketSize& b : sources_.segments.buckets(plan, id)) {
            auto it = std::find_if(gathered.begin(), gathered.end(), [&b](const Gathered& g) {
                return std::tie(g.all.group, g.all.weight_dtype) == std::tie(b.group, b.weight_dtype);
            });
            if (it == gathered.end()) {
                it = gathered.insert(it, {b, {}});
                it->all.elements = it->all.matrices = 0;
                it->all.group_size = plan::group_size(plan, b.group);
            }
            it->all.elements += count * b.elements;
            it->parts.emplace_back(static_cast<int>(p), b.elements);
        }
    }
    std::vector<Moved> result;
    for (const Gathered& g : gathered) {
        const double quantize = estimate::seconds_of(costs, g.all, passes::StepWork::quantize),
                     gather = estimate::seconds_of(costs, g.all, passes::StepWork::gather) + quantize,
                     reduce = estimate::seconds_of(costs, g.all, passes::StepWork::reduce);
        if (gather == 0.0) continue;
        if (plan.pp > 1) {
            result.push_back({g.parts.front().first, 1, gather, reduce, quantize});
            continue;
        }
        for (const auto& of_part : g.parts) {
            const auto part = of_part.first;
            const double share = static_cast<double>(of_part.second) / static_cast<double>(g.all.elements);
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

estimate::StageMemory FastBoundModel::whole_model(const plan::Plan& plan) {
    list_segments(plan.model);
    estimate::Segments layers;
    for (std::size_t i = 0; i < segments_.size(); ++i)
        if (segments_[i].kind == lower::SegmentKind::layer) layers.emplace_back(segments_[i], counts_[i]);
    plan::Stage ends;
    ends.embedding = ends.loss = true;
    ends.mtp = static_cast<int>(plan.model->mtp.size());
    estimate::StageMemory all;
    for (const passes::BucketSize& b : buckets(plan, ends, layers)) all.add_states(plan, b);
    return all;
}

double FastBoundModel::least_bytes(const plan::Plan& plan) {
    const estimate::StageMemory all = whole_model(plan);
    return (all.states + all.visiting) / plan.pp + memory::library_memory(plan);
}

double FastBoundModel::least_visit(const plan::Plan& plan) {
    if ((plan.offload & plan::offload::optimizer) == 0) return 0.0;
    const plan::PlanKey<plan::Subject::cut> key(plan);
    if (const auto known = known_visits_.find(key); known != known_visits_.end()) return known->second;
    const cost::CostModel costs(plan, sources_.segments.stack(), sources_.segments.machine());
    return known_visits_.emplace(key, visit_seconds(costs, whole_model(plan).visiting / plan.pp)).first->second;
}

const FastBoundModel::KeptSegments& FastBoundModel::kept(const Layers& layers, Stages& stages) {
    const plan::Plan& plan = stages.plan;
    const int enough = estimate::enough_micro_batches(plan);
    const KeptSegments*& known = stages.kept[{enough, plan.ep_overlap ? 1 : 0, layers.pools}];
    if (known != nullptr) return *known;
    const auto [it, fresh] = kept_.try_emplace({stages.shape, plan.schedule, enough, plan.ep_overlap, layers.pools});
    known = &it->second;
    if (!fresh) return *known;
    const std::vector<int>& pools = pools_[static_cast<std::size_t>(layers.pools)];
    std::vector<estimate::SavedSegments> saved(stages.parts.size());
    for (std::size_t d = 0; d < saved.size(); ++d) {
        for (const auto& [index, count] : stages.parts[d]) {
            const int pool = pools[static_cast<std::size_t>(index)];
            if (pool >= 0) saved[d].add(segments_[static_cast<std::size_t>(index)].kind, count, pool);
        }
    }
    for (int r = 0; r < plan.pp; ++r) {
        std::vector<const estimate::SavedSegments*> chunks;
        for (int c = 0; c < plan.vpp; ++c)
            chunks.push_back(&saved[static_cast<std::size_t>(
                stages.shape->of_stage[static_cast<std::size_t>(plan::stage_of(plan.schedule, plan.pp, r, c))])]);
        const std::vector<plan::Kept>& kept = sources_.orders.of(plan, enough, r).kept;
        std::vector<int> most(layers.pool_bytes.size(), 0);
        for (const auto& [pool, segments] : estimate::most_kept(chunks, kept))
            most[static_cast<std::size_t>(pool)] = segments;
        it->second.push_back({std::move(most), estimate::merges(kept)});
    }
    return *known;
}

} // namespace moe::bound
