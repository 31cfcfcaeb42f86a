// Lowers and plays each distinct segment once, and keeps the result under everything that it depends on.
#include "simulator/estimate/segment_cache.hpp"

#include "planner/lower/emit/builder.hpp"
#include "planner/lower/emit/parameters.hpp"
#include "planner/model/model.hpp"
#include "planner/program/communicators.hpp"

#include <algorithm>

namespace moe {

bool has_experts(const Plan& plan, SegmentId id) {
    const bool layer = id.kind == SegmentKind::layer || is_mtp(id.kind);
    return layer && plan.model->kinds[static_cast<std::size_t>(id.layer_kind)].moe.has_value();
}

SegmentCache::SegmentCache(const Hardware& hardware, Stack stack) : machine_(hardware), stack_(std::move(stack)) {}

void SegmentCache::keep_model(const Plan& plan) {
    if (std::find(models_.begin(), models_.end(), plan.model) == models_.end()) models_.push_back(plan.model);
}

Placements SegmentCache::placements(const Plan& plan) const {
    const auto at = [&](Group group) { return machine_.routes.placement(plan, group); };
    Placements places{at(groups::tensor), at(groups::context), at(groups::expert), at(groups::expert_tensor),
                      at(groups::dispatch)};
    if (plan.reshards()) {
        places[5] = at({Domain::dense, axis::data | axis::context});
        places[6] = at({Domain::expert, axis::data});
    }
    if (plan.router.has_loss()) places[7] = at({Domain::dense, axis::tensor | axis::context});
    return places;
}

SegmentCache::CostKey SegmentCache::cost_key(const Plan& plan, SegmentId id) const {
    const bool table = (id.kind == SegmentKind::embedding || is_mtp(id.kind)) && shares_table(plan);
    return {{plan, id}, PlanKey<Subject::weights>(plan, has_experts(plan, id)), table, placements(plan)};
}

SegmentSize SegmentCache::size(const Plan& plan, SegmentId id) {
    // Rows are proportional to the tokens of a micro-batch; what is not (counts per expert) is the same in both. Only
    // sizes that TP divides are played, so that no rounding is extrapolated.
    if (plan.seq / plan.cp % plan.tp != 0) return lowered(plan, id, plan.mbs);
    // Not so FSDP's weights beside them, nor what is offloaded, which depends on its size.
    if (plan.reshards() || (plan.offload & ~offload::optimizer) != 0) return lowered(plan, id, plan.mbs);
    const SegmentSize& one = lowered(plan, id, 1);
    if (plan.mbs == 1) return one;
    const SegmentSize& two = lowered(plan, id, 2);
    SegmentSize size = one;
    const auto extend = [&plan](std::int64_t a, std::int64_t b) { return a + (b - a) * (plan.mbs - 1); };
    size.memory = {extend(one.memory.saved, two.memory.saved), extend(one.memory.forward, two.memory.forward),
                   extend(one.memory.backward, two.memory.backward)};
    size.slots = extend(one.slots, two.slots);
    return size;
}

const SegmentSize& SegmentCache::lowered(const Plan& plan, SegmentId id, std::int64_t mbs) {
    Plan small = plan;
    small.mbs = mbs;
    const SegmentKey<Subject::size> k(small, id);
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto it = sizes_.find(k);
        if (it != sizes_.end()) return *it->second;
    }
    const Program program = lower_segment(small, id.kind, id.layer_kind);
    auto size = std::make_unique<SegmentSize>();
    size->memory = segment_memory(program);
    for (const Template& tmpl : program.templates)
        for (const Op& op : tmpl.ops)
            if (is_communication(op.kind)) size->groups |= group_bit(op.group);
    size->slots = all_slots(program);
    const std::lock_guard<std::mutex> lock(mutex_);
    keep_model(plan);
    return *sizes_.emplace(k, std::move(size)).first->second;
}

const SegmentCost& SegmentCache::cost(const Plan& plan, SegmentId id) {
    const CostKey k = cost_key(plan, id);
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto it = costs_.find(k);
        if (it != costs_.end()) return *it->second;
    }
    const CostModel model(plan, stack_, machine_);
    auto result = std::make_unique<SegmentCost>(segment_cost(model, id));
    const std::lock_guard<std::mutex> lock(mutex_);
    keep_model(plan);
    return *costs_.emplace(k, std::move(result)).first->second;
}

MergedTime SegmentCache::merged(const Plan& plan, MergedPlayer& player, const Segments& forward,
                                const Segments& backward) {
    const auto& kinds = plan.model->kinds;
    const auto routed =
        std::find_if(kinds.begin(), kinds.end(), [](const LayerKind& kind) { return kind.moe.has_value(); });
    const SegmentId any{SegmentKind::layer, static_cast<int>(routed - kinds.begin())}; // depends on every field
    std::tuple<CostKey, Segments, Segments> k{cost_key(plan, any), forward, backward};
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto it = merged_.find(k);
        if (it != merged_.end()) return it->second;
    }
    const MergedTime time = player.play(forward, backward);
    const std::lock_guard<std::mutex> lock(mutex_);
    keep_model(plan);
    return merged_.emplace(std::move(k), time).first->second;
}

const std::vector<BucketSize>& SegmentCache::buckets(const Plan& plan, SegmentId id) {
    const bool table = (id.kind == SegmentKind::embedding || is_mtp(id.kind)) && shares_table(plan);
    const BucketKey k{PlanKey<Subject::weights>(plan, has_experts(plan, id)), table, id, {}};
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto it = buckets_.find(k);
        if (it != buckets_.end()) return *it->second;
    }
    Stage stage;
    const auto& layers = plan.model->layers;
    switch (id.kind) {
    case SegmentKind::embedding:
        stage.embedding = true;
        break;
    case SegmentKind::head:
    case SegmentKind::all_heads:
        stage.loss = true;
        break;
    case SegmentKind::layer:
        stage.first_layer = static_cast<int>(std::find(layers.begin(), layers.end(), id.layer_kind) - layers.begin());
        stage.layers = 1;
        break;
    case SegmentKind::mtp:
    case SegmentKind::mtp_body:
        stage.mtp = 1;
        break;
    }
    auto sizes = std::make_unique<std::vector<BucketSize>>(bucket_sizes(plan, stage));
    const std::lock_guard<std::mutex> lock(mutex_);
    keep_model(plan);
    return *buckets_.emplace(k, std::move(sizes)).first->second;
}

const std::vector<BucketSize>& SegmentCache::stage_buckets(const Plan& plan, const Stage& stage) {
    const bool table = (stage.embedding || stage.mtp > 0) && shares_table(plan);
    constexpr SegmentId none{SegmentKind::layer, -1};
    const BucketKey k{PlanKey<Subject::weights>(plan),
                      table,
                      none,
                      {stage.first_layer, stage.layers, stage.mtp, stage.embedding ? 1 : 0, stage.loss ? 1 : 0}};
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto it = buckets_.find(k);
        if (it != buckets_.end()) return *it->second;
    }
    auto sizes = std::make_unique<std::vector<BucketSize>>(bucket_sizes(plan, stage));
    const std::lock_guard<std::mutex> lock(mutex_);
    return *buckets_.emplace(k, std::move(sizes)).first->second;
}

} // namespace moe
