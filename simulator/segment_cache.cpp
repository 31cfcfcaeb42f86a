// Lowers and plays each distinct segment once, and keeps the result under everything that it depends on.
#include "simulator/segment_cache.hpp"

#include "planner/builder.hpp"
#include "planner/routing.hpp"
#include "simulator/ranks.hpp"

#include <algorithm>
#include <numeric>

namespace moe {
namespace {

// A segment as the only work of a rank. Micro-batch 0 for one direction and 1 for the other keep their tensors apart.
RankRun play_alone(const Stack& stack, const std::shared_ptr<const Program>& program,
                   const std::shared_ptr<const ProgramCosts>& costs, const std::vector<Unit>& units, double lead) {
    RankRun run;
    run.program = program;
    run.costs = costs;
    play_segment(stack, run, units, lead);
    return run;
}

double end_of(const RankRun& run) {
    double end = 0.0;
    for (const TimelineRow& row : run.rows) end = std::max(end, row.end);
    return end;
}

// When the first op that reads the segment's input starts; 0 for segments that have none.
double before_input(const Program& program, const RankRun& run, std::size_t lane) {
    const char* name = lane == 0 ? "segment_in" : "segment_dout";
    for (const TimelineRow& row : run.rows)
        for (const TensorId id : program.templates[lane].ops[static_cast<std::size_t>(row.op)].in)
            if (id != no_tensor && program.tensors[static_cast<std::size_t>(id)].name == name) return row.start;
    return 0.0;
}

// What a layer saves among others like it is communication.
void run_on(SegmentTime& time, double period) {
    double saved = time.device - period;
    if (saved <= 0.0) return;
    time.device -= saved;
    time.together -= saved;
    Breakdown& b = time.parts;
    for (double* part : {&b.context, &b.tensor, &b.expert, &b.host, &b.bubble, &b.compute}) {
        const double here = std::min(*part, saved);
        *part -= here;
        saved -= here;
    }
}

constexpr double far_ahead = 1e3; // seconds; no segment lasts as long

// Fields of a key that change times but no sizes: CUDA graphs, EP overlap, pipeline and data parallelism, moments.
constexpr std::size_t timing_only[] = {12, 13, 15, 16, 17, 18};

// When the ops of a run that touch each bucket's weights (forward) or gradients (backward) run.
std::vector<BucketUse> uses_of(const Program& program, const RankRun& forward, const RankRun& backward) {
    const auto root = [&program](TensorId id) {
        const TensorId base = program.tensors[static_cast<std::size_t>(id)].base;
        return base == no_tensor ? id : base;
    };
    const auto touches = [&root](const std::vector<TensorId>& ids, TensorId what) {
        return std::any_of(ids.begin(), ids.end(), [&](TensorId id) { return id != no_tensor && root(id) == what; });
    };
    std::vector<BucketUse> uses;
    const double end = end_of(backward);
    for (const Bucket& b : program.buckets) {
        const Dtype dtype = program.tensors[static_cast<std::size_t>(b.weights)].dtype;
        BucketUse use{{b.domain, b.elements, b.group, b.group_size, dtype}, 0.0, 0.0, end};
        for (const TimelineRow& row : forward.rows)
            if (touches(program.templates[0].ops[static_cast<std::size_t>(row.op)].in, b.weights))
                use.after_read = std::max(use.after_read, end_of(forward) - row.start);
        for (const TimelineRow& row : backward.rows) {
            if (!touches(program.templates[1].ops[static_cast<std::size_t>(row.op)].out, b.gradients)) continue;
            use.after_written = std::max(use.after_written, end - row.start);
            use.after_final = std::min(use.after_final, end - row.end);
        }
        uses.push_back(use);
    }
    return uses;
}

} // namespace

SegmentCache::SegmentCache(const Hardware& hardware, Stack stack) : routes_(hardware), stack_(std::move(stack)) {}

int SegmentCache::model_number(const Plan& plan) {
    const auto it = std::find(models_.begin(), models_.end(), plan.model);
    if (it != models_.end()) return static_cast<int>(it - models_.begin());
    models_.push_back(plan.model);
    return static_cast<int>(models_.size()) - 1;
}

SegmentCache::Fields SegmentCache::fields(const Plan& p, SegmentId id) {
    const auto number = [](auto value) { return static_cast<std::int64_t>(value); };
    const Routing routing = routing_from_string(p.routing);
    const bool layer = id.kind == SegmentKind::layer || id.kind == SegmentKind::mtp;
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
    return {routes_.placement(plan, groups::tensor), routes_.placement(plan, groups::context),
            routes_.placement(plan, groups::expert), routes_.placement(plan, groups::expert_tensor),
            routes_.placement(plan, groups::dispatch)};
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
    Program copy = lower_segment(plan, id.kind, id.layer_kind);
    copy.in_flight = {2};
    copy.slots = {{0, 0}, {1, 1}};
    const auto program = std::make_shared<const Program>(std::move(copy));
    const CostModel model(plan, stack_, routes_);
    const auto costs = std::make_shared<const ProgramCosts>(price(model, *program));

    auto result = std::make_unique<SegmentCost>();
    RankRun runs[2];
    for (int slot = 0; slot < 2; ++slot) {
        SegmentTime& time = slot == 0 ? result->forward : result->backward;
        Unit unit;
        unit.lanes[0] = {slot};
        RankRun& ahead = runs[slot];
        ahead = play_alone(stack_, program, costs, {unit}, far_ahead);
        const RankRun together = play_alone(stack_, program, costs, {unit}, 0.0);
        time.device = end_of(ahead);
        time.together = end_of(together);
        time.host = together.host_seconds;
        time.unaided = before_input(*program, ahead, static_cast<std::size_t>(slot));
        time.lead_after = time.device - ahead.host_seconds;
        time.parts = breakdown_of(plan, ahead, time.device);
        for (const OpCost& c : (*costs)[static_cast<std::size_t>(slot)]) time.waits = time.waits || c.waits_for_counts;
        // Rings of context parallelism send, and stashed or offloaded rows come and go, while other layers run.
        if (id.kind == SegmentKind::layer && (plan.cp > 1 || plan.paged_stash || plan.offload != 0)) {
            const double period = layer_period(model, id, slot == 0);
            // Among others, a host that waits may never get ahead again: then it sets the pace.
            if (time.waits && period > 1.001 * time.device)
                time.together = std::max(time.together, period + time.lead_after);
            run_on(time, period);
        }
    }
    result->uses = uses_of(*program, runs[0], runs[1]);
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
        stage.loss = true;
        break;
    case SegmentKind::layer:
        stage.first_layer = static_cast<int>(std::find(layers.begin(), layers.end(), id.layer_kind) - layers.begin());
        stage.layers = 1;
        break;
    case SegmentKind::mtp:
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
