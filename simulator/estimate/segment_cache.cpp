// Lowers and plays each distinct segment once, and keeps the result under everything that it depends on.
#include "simulator/estimate/segment_cache.hpp"

#include "planner/lower/emit/builder.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/routing.hpp"
#include "planner/program/communicators.hpp"

#include <algorithm>

namespace moe {
namespace {

// Fields of a key that change times but no sizes: CUDA graphs, EP overlap, pipeline and data parallelism, moments.
constexpr std::size_t timing_only[] = {12, 13, 15, 16, 17, 18};

} // namespace

SegmentCache::SegmentCache(const Hardware& hardware, Stack stack) : machine_(hardware), stack_(std::move(stack)) {}

int SegmentCache::model_number(const Plan& plan) {
    const auto it = std::find(models_.begin(), models_.end(), plan.model);
    if (it != models_.end()) return static_cast<int>(it - models_.begin());
    models_.push_back(plan.model);
    return static_cast<int>(models_.size()) - 1;
}

SegmentCache::Fields SegmentCache::fields(const Plan& p, SegmentId id) {
    const auto number = [](auto value) { return static_cast<std::int64_t>(value); };
    const Routing routing = routing_from_string(p.routing);
    const bool layer = id.kind == SegmentKind::layer || is_mtp(id.kind);
    const bool experts = layer && p.model->kinds[static_cast<std::size_t>(id.layer_kind)].moe.has_value();
    const auto of_experts = [&](auto value) { return experts ? number(value) : 0; };
    return {0,
            number(id.kind),
            id.layer_kind,
            p.tp,
            p.cp,
            of_experts(p.ep),
            of_experts(p.etp),
            p.mbs,
            p.seq,
            number(p.precision),
            number(p.recompute),
            of_experts(p.dispatcher),
            number(p.cuda_graph),
            number(p.ep_overlap),
            of_experts(p.capacity * 1e6),
            of_experts(p.router.expert_capacity * 1e6),
            of_experts(p.router.pad_to_capacity),
            number(p.pp > 1),
            number(p.dp > 1),
            of_experts(p.edp > 1),
            number(p.optimizer.bf16_moments),
            p.reshards() ? 1 + 2 * number(p.dp > 1) + 4 * number(p.edp > 1) : 0,
            number(p.schedule),
            number(p.offload),
            number(p.core_attention()),
            of_experts(p.experts()),
            number(p.head()),
            number(p.fp8_scaling),
            number(p.gradients),
            number(p.cp_comm),
            number(p.tp_overlap),
            number(p.delay_wgrad),
            number(p.paged_stash),
            number(p.memory_efficient_permutation),
            number(p.deterministic),
            number(routing.load * 1e6),
            number(routing.spread * 1e6),
            0};
}

SegmentCache::Key SegmentCache::key(const Plan& plan, SegmentId id) {
    Key key = fields(plan, id);
    key[0] = model_number(plan);
    return key;
}

std::array<Placement, 5> SegmentCache::placements(const Plan& plan) const {
    return {machine_.routes.placement(plan, groups::tensor), machine_.routes.placement(plan, groups::context),
            machine_.routes.placement(plan, groups::expert), machine_.routes.placement(plan, groups::expert_tensor),
            machine_.routes.placement(plan, groups::dispatch)};
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
    Key k;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        k = key(plan, id);
        k[7] = mbs;
        for (const std::size_t i : timing_only) k[i] = 0;
        const auto it = sizes_.find(k);
        if (it != sizes_.end()) return *it->second;
    }
    Plan small = plan;
    small.mbs = mbs;
    const Program program = lower_segment(small, id.kind, id.layer_kind);
    auto size = std::make_unique<SegmentSize>();
    size->memory = segment_memory(program);
    for (const Template& tmpl : program.templates)
        for (const Op& op : tmpl.ops)
            if (is_communication(op.kind)) size->groups |= group_bit(op.group);
    size->slots = all_slots(program);
    const std::lock_guard<std::mutex> lock(mutex_);
    return *sizes_.emplace(k, std::move(size)).first->second;
}

const SegmentCost& SegmentCache::cost(const Plan& plan, SegmentId id) {
    const std::array<Placement, 5> where = placements(plan);
    CostKey k;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        k = {key(plan, id), where};
        const auto it = costs_.find(k);
        if (it != costs_.end()) return *it->second;
    }
    const CostModel model(plan, stack_, machine_);
    auto result = std::make_unique<SegmentCost>(segment_cost(model, id));
    const std::lock_guard<std::mutex> lock(mutex_);
    return *costs_.emplace(k, std::move(result)).first->second;
}

MergedTime SegmentCache::merged(const Plan& plan, MergedPlayer& player, const Segments& forward,
                                const Segments& backward) {
    const std::array<Placement, 5> where = placements(plan);
    const auto& kinds = plan.model->kinds;
    const auto routed =
        std::find_if(kinds.begin(), kinds.end(), [](const LayerKind& kind) { return kind.moe.has_value(); });
    const SegmentId any{SegmentKind::layer, static_cast<int>(routed - kinds.begin())}; // depends on every field
    std::tuple<CostKey, Segments, Segments> k;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        k = {{key(plan, any), where}, forward, backward};
        const auto it = merged_.find(k);
        if (it != merged_.end()) return it->second;
    }
    const MergedTime time = player.play(forward, backward);
    const std::lock_guard<std::mutex> lock(mutex_);
    return merged_.emplace(std::move(k), time).first->second;
}

const std::vector<BucketSize>& SegmentCache::buckets(const Plan& plan, SegmentId id) {
    Key k;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        k = key(plan, id);
        // Sizes do not depend on how the segment computes.
        for (const std::size_t i : {7u, 8u, 10u, 11u, 12u, 13u, 14u}) k[i] = 0;
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
    return *buckets_.emplace(k, std::move(sizes)).first->second;
}

const std::vector<BucketSize>& SegmentCache::stage_buckets(const Plan& plan, const Stage& stage) {
    Key k{};
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        k = {model_number(plan),
             plan.tp,
             plan.cp,
             plan.ep,
             plan.etp,
             plan.dp,
             plan.edp,
             plan.pp,
             stage.first_layer,
             stage.layers,
             stage.mtp,
             stage.embedding ? 1 : 0,
             stage.loss ? 1 : 0,
             static_cast<std::int64_t>(plan.precision),
             static_cast<std::int64_t>(plan.experts()),
             static_cast<std::int64_t>(plan.head()),
             plan.reshards() ? 1 : 0};
        const auto it = stage_buckets_.find(k);
        if (it != stage_buckets_.end()) return *it->second;
    }
    auto sizes = std::make_unique<std::vector<BucketSize>>(bucket_sizes(plan, stage));
    const std::lock_guard<std::mutex> lock(mutex_);
    return *stage_buckets_.emplace(k, std::move(sizes)).first->second;
}

} // namespace moe
