// Lowers and plays each distinct segment once, and keeps the result under everything that it depends on.
#include "simulator/estimate/segment_cache.hpp"

#include "planner/lower/emit/builder.hpp"
#include "planner/lower/emit/parameters.hpp"
#include "planner/model/model.hpp"
#include "planner/program/communicators.hpp"

#include <algorithm>

namespace moe::estimate {

bool has_experts(const plan::Plan& plan, SegmentId id) {
    const bool layer = id.kind == lower::SegmentKind::layer || lower::is_mtp(id.kind);
    return layer && plan.model->kinds[static_cast<std::size_t>(id.layer_kind)].moe.has_value();
}

unsigned parts_of(const plan::Plan& plan, SegmentId id) {
    unsigned parts = has_experts(plan, id) ? plan::part::experts : 0;
    if (id.kind == lower::SegmentKind::layer || lower::is_mtp(id.kind)) parts |= plan::part::attention;
    const bool table = id.kind == lower::SegmentKind::embedding && plan.model->tied_embeddings;
    if (lower::is_head(id.kind) || lower::is_mtp(id.kind) || table) parts |= plan::part::head;
    return parts;
}

SegmentCache::SegmentCache(const machine::Hardware& hardware, stack::Stack stack)
    : machine_(hardware), stack_(std::move(stack)) {}

void SegmentCache::keep_model(const plan::Plan& plan) {
    if (std::find(models_.begin(), models_.end(), plan.model) == models_.end()) models_.push_back(plan.model);
}

Placements SegmentCache::placements(const plan::Plan& plan) const {
    const auto at = [&](plan::Group group) { return machine_.routes.placement(plan, group); };
    Placements places{at(emit::groups::tensor), at(emit::groups::context), at(emit::groups::expert),
                      at(emit::groups::expert_tensor), at(emit::groups::dispatch)};
    if (plan.reshards()) {
        places[5] = at(emit::gradient_group(plan, plan::Domain::dense, plan::axis::tensor));
        places[6] = at(emit::gradient_group(plan, plan::Domain::expert, plan::axis::tensor));
        places[10] = at(emit::gradient_group(plan, plan::Domain::dense, plan::axis::key_parts));
    }
    if (plan.cp_comm == plan::ContextComm::hierarchical) {
        places[8] = at(emit::groups::context_inner);
        places[9] = at(emit::groups::context_outer);
    }
    if (plan::expert_inner(plan) < plan.ep) {
        places[11] = at(emit::groups::expert_inner);
        places[12] = at(emit::groups::expert_outer);
    }
    if (plan.router.has_loss()) places[7] = at({plan::Domain::dense, plan::axis::tensor | plan::axis::context});
    return places;
}

SegmentCache::CostKey SegmentCache::cost_key(const plan::Plan& plan, SegmentId id) const {
    const bool table = (id.kind == lower::SegmentKind::embedding || lower::is_mtp(id.kind)) && emit::shares_table(plan);
    return {{plan, id}, plan::PlanKey<plan::Subject::weights>(plan, parts_of(plan, id)), table, placements(plan)};
}

const SegmentSize& SegmentCache::size(const plan::Plan& plan, SegmentId id) { return lowered(plan, id, plan.mbs); }

const SegmentSize& SegmentCache::lowered(const plan::Plan& plan, SegmentId id, std::int64_t mbs) {
    plan::Plan small = plan;
    small.mbs = mbs;
    const SegmentKey<plan::Subject::size> k(small, id);
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto it = sizes_.find(k);
        if (it != sizes_.end()) return *it->second;
    }
    const program::Program program = lower::lower_segment(small, id.kind, id.layer_kind);
    auto size = std::make_unique<SegmentSize>();
    size->memory = memory::segment_memory(program);
    for (const program::Template& tmpl : program.templates)
        for (const program::Op& op : tmpl.ops)
            if (program::is_communication(op.kind)) size->groups |= group_bit(op.group);
    size->slots = program::all_slots(program) + program::windows_of(program);
    size->scaled = program::scaled_roles * static_cast<int>(program.io.scaled.size());
    const std::lock_guard<std::mutex> lock(mutex_);
    keep_model(plan);
    return *sizes_.emplace(k, std::move(size)).first->second;
}

const SegmentCost& SegmentCache::cost(const plan::Plan& plan, SegmentId id) {
    const CostKey k = cost_key(plan, id);
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto it = costs_.find(k);
        if (it != costs_.end()) return *it->second;
    }
    const cost::CostModel model(plan, stack_, machine_);
    auto result = std::make_unique<SegmentCost>(segment_cost(model, id));
    const std::lock_guard<std::mutex> lock(mutex_);
    keep_model(plan);
    return *costs_.emplace(k, std::move(result)).first->second;
}

MergedTime SegmentCache::merged(const plan::Plan& plan, MergedPlayer& player, const Segments& forward,
                                const Segments& backward) {
    const auto& kinds = plan.model->kinds;
    const auto routed =
        std::find_if(kinds.begin(), kinds.end(), [](const model::LayerKind& kind) { return kind.moe.has_value(); });
    const SegmentId any{lower::SegmentKind::layer, static_cast<int>(routed - kinds.begin())}; // any: reads every field
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

const std::vector<passes::BucketSize>& SegmentCache::buckets(const plan::Plan& plan, SegmentId id) {
    const bool table = (id.kind == lower::SegmentKind::embedding || lower::is_mtp(id.kind)) && emit::shares_table(plan);
    const BucketKey k{plan::PlanKey<plan::Subject::weights>(plan, parts_of(plan, id)), table, id, {}};
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto it = buckets_.find(k);
        if (it != buckets_.end()) return *it->second;
    }
    plan::Stage stage;
    const auto& layers = plan.model->layers;
    switch (id.kind) {
    case lower::SegmentKind::embedding:
        stage.embedding = true;
        break;
    case lower::SegmentKind::head:
    case lower::SegmentKind::all_heads:
        stage.loss = true;
        break;
    case lower::SegmentKind::layer:
        stage.first_layer = static_cast<int>(std::find(layers.begin(), layers.end(), id.layer_kind) - layers.begin());
        stage.layers = 1;
        break;
    case lower::SegmentKind::mtp:
    case lower::SegmentKind::mtp_body:
        stage.mtp = 1;
        break;
    }
    auto sizes = std::make_unique<std::vector<passes::BucketSize>>(lower::bucket_sizes(plan, stage));
    const std::lock_guard<std::mutex> lock(mutex_);
    keep_model(plan);
    return *buckets_.emplace(k, std::move(sizes)).first->second;
}

const std::vector<passes::BucketSize>& SegmentCache::stage_buckets(const plan::Plan& plan, const plan::Stage& stage) {
    const bool table = (stage.embedding || stage.mtp > 0) && emit::shares_table(plan);
    constexpr SegmentId none{lower::SegmentKind::layer, -1};
    const BucketKey k{plan::PlanKey<plan::Subject::weights>(plan),
                      table,
                      none,
                      {stage.first_layer, stage.layers, stage.mtp, stage.embedding ? 1 : 0, stage.loss ? 1 : 0}};
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto it = buckets_.find(k);
        if (it != buckets_.end()) return *it->second;
    }
    auto sizes = std::make_unique<std::vector<passes::BucketSize>>(lower::bucket_sizes(plan, stage));
    const std::lock_guard<std::mutex> lock(mutex_);
    return *buckets_.emplace(k, std::move(sizes)).first->second;
}

} // namespace moe::estimate
