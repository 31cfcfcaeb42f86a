// Lowers and plays each distinct segment once, and keeps the result under everything that it depends on.
#include "simulator/segment_cache.hpp"

#include "planner/builder.hpp"
#include "planner/communicators.hpp"
#include "planner/passes/first_gradients.hpp"
#include "planner/routing.hpp"
#include "simulator/ranks.hpp"

#include <algorithm>
#include <numeric>

namespace moe {
namespace {

constexpr double far_ahead = 1e3; // seconds; no segment lasts as long

double end_of(const RankRun& run) {
    double end = 0.0;
    for (const TimelineRow& row : run.rows) end = std::max(end, row.end);
    return end;
}

// Plays one direction of a segment as the only work of a rank. Micro-batch 0 for one direction and 1 for the other keep
// their tensors apart.
class Alone {
public:
    Alone(const Stack& stack, std::shared_ptr<const Program> program, std::shared_ptr<const ProgramCosts> costs,
          std::shared_ptr<const Reuses> reuses, BesideExchange beside, int slot)
        : stack_(stack),
          program_(std::move(program)),
          costs_(std::move(costs)),
          reuses_(std::move(reuses)),
          beside_(beside) {
        unit_.lanes[0] = {slot};
        for (const Op& op : program_->templates[static_cast<std::size_t>(slot)].ops) {
            rings_ = rings_ || op.kind == OpKind::ring_exchange;
            copies_ = copies_ || op.stream == Stream::host;
        }
    }

    // Rings of context parallelism send, and stashed or offloaded rows come and go, while other layers run.
    bool runs_ahead() const { return rings_ || copies_; }

    RankRun play(const Clocks& start, TensorId late = no_tensor) const {
        RankRun run;
        run.program = program_;
        run.costs = costs_;
        run.reuses = reuses_;
        run.beside = beside_;
        play_segment(stack_, run, {unit_}, start, late, far_ahead);
        return run;
    }

    Passage passage() const {
        const double now = far_ahead, ring = runs_ahead() ? 0.0 : now;
        Passage p;
        p.from_host = from_now({now, 0.0, 0.0});
        p.from_device = from_now({0.0, now, ring}, message());
        if (runs_ahead()) p.from_ring = from_now({0.0, 0.0, now});
        p.from_message = message() == no_tensor ? p.from_device : from_now({}, message());
        return p;
    }
    Clocks after(TensorId late) const { return from_now({}, late); }

private:
    // What the neighbour sends, see lower_segment().
    TensorId message() const {
        const char* name = unit_.lanes[0].front() == 0 ? "segment_in" : "segment_dout";
        const auto it = std::find_if(program_->tensors.begin(), program_->tensors.end(),
                                     [name](const Tensor& tensor) { return tensor.name == name; });
        return it == program_->tensors.end() ? no_tensor : static_cast<TensorId>(it - program_->tensors.begin());
    }
    // The clocks at the end, from those at far_ahead; a clock that is not past it does not depend on them.
    Clocks from_now(const Clocks& start, TensorId late = no_tensor) const {
        const RankRun run = play(start, late);
        Clocks end{run.host_seconds, start.device, start.ring};
        for (const TimelineRow& row : run.rows) {
            // What is computed next waits for communication, but not for copies to the host.
            const bool copy = row.stream == Stream::host;
            if (!copy) end.device = std::max(end.device, row.end);
            if (copy || (rings_ && row.stream == Stream::tensor) || (copies_ && uses_buffer(row)))
                end.ring = std::max(end.ring, row.end);
        }
        for (double* clock : {&end.host, &end.device, &end.ring})
            *clock = *clock < far_ahead ? Passage::never : *clock - far_ahead;
        return end;
    }

    bool uses_buffer(const TimelineRow& row) const {
        const Op& op =
            program_->templates[static_cast<std::size_t>(unit_.lanes[0].front())].ops[static_cast<std::size_t>(row.op)];
        const auto shared = [this](TensorId id) {
            return id != no_tensor && is_buffer(program_->tensors[static_cast<std::size_t>(id)]);
        };
        return std::any_of(op.in.begin(), op.in.end(), shared) || std::any_of(op.out.begin(), op.out.end(), shared);
    }

    const Stack& stack_;
    std::shared_ptr<const Program> program_;
    std::shared_ptr<const ProgramCosts> costs_;
    std::shared_ptr<const Reuses> reuses_;
    BesideExchange beside_;
    Unit unit_;
    bool rings_ = false, copies_ = false;
};

// Seconds of one among others like it, the host being far ahead.
double period(const Passage& passage) {
    constexpr int others = 6;
    Clocks clocks{-far_ahead, 0.0, 0.0};
    double first = 0.0;
    for (int i = 0; i <= others; ++i) {
        clocks = passage.after(clocks, clocks.device);
        if (i == 0) first = clocks.device;
    }
    return (clocks.device - first) / others;
}

// What a layer saves among others like it is communication.
void run_on(SegmentTime& time, double period) {
    double saved = time.device - period;
    if (saved <= 0.0) return;
    time.device -= saved;
    Breakdown& b = time.parts;
    for (double* part : {&b.context, &b.tensor, &b.expert, &b.host, &b.bubble, &b.compute}) {
        const double here = std::min(*part, saved);
        *part -= here;
        saved -= here;
    }
}

// Fields of a key that change times but no sizes: CUDA graphs, EP overlap, pipeline and data parallelism, moments.
constexpr std::size_t timing_only[] = {12, 13, 15, 16, 17, 18};

// `backward`: played with the host far ahead.
std::vector<BucketUse> uses_of(const Program& program, const FirstGradients& first, const Alone& forward,
                               const Alone& first_backward, const RankRun& backward) {
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
        BucketUse use{{b.domain, b.elements, b.group, b.group_size, dtype},
                      forward.after(root(b.weights)),
                      first_backward.after(root(b.gradients)),
                      end};
        for (const auto& [from, to] : first.unset(b)) use.zeroed += to - from;
        for (const TimelineRow& row : backward.rows)
            if (touches(program.templates[1].ops[static_cast<std::size_t>(row.op)].out, b.gradients))
                use.after_final = std::min(use.after_final, end - row.end);
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
    const auto lowered = std::make_shared<Program>(lower_segment(plan, id.kind, id.layer_kind));
    lowered->in_flight = {2};
    lowered->slots = {{0, 0}, {1, 1}};
    FirstGradients first(*lowered);
    if (sets_first_gradients(plan))
        if (auto setting = first.next(lowered->templates[1])) {
            lowered->templates.push_back(std::move(*setting));
            lowered->slots.push_back({2, 1});
        }
    const std::shared_ptr<const Program> program = lowered;
    const CostModel model(plan, stack_, routes_);
    const auto costs = std::make_shared<const ProgramCosts>(price(model, *program));

    auto result = std::make_unique<SegmentCost>();
    const std::shared_ptr<const Reuses> reuses = reuses_in(plan, *program);
    const BesideExchange beside = model.beside_exchange();
    const Alone alone[2] = {{stack_, program, costs, reuses, beside, 0}, {stack_, program, costs, reuses, beside, 1}};
    RankRun ahead;
    for (int slot = 0; slot < 2; ++slot) {
        SegmentTime& time = slot == 0 ? result->forward : result->backward;
        ahead = alone[slot].play({-far_ahead, 0.0, 0.0});
        time.device = end_of(ahead);
        time.parts = breakdown_of(plan, ahead, time.device);
        time.passage = alone[slot].passage();
        if (alone[slot].runs_ahead()) run_on(time, period(time.passage));
    }
    const Alone first_backward(stack_, program, costs, reuses, beside, static_cast<int>(program->templates.size()) - 1);
    result->first_backward = result->backward;
    if (program->templates.size() > 2) {
        SegmentTime& time = result->first_backward;
        time.device = end_of(first_backward.play({-far_ahead, 0.0, 0.0}));
        time.passage = first_backward.passage();
        if (first_backward.runs_ahead()) run_on(time, period(time.passage));
    }
    result->uses = uses_of(*program, first, alone[0], first_backward, ahead);
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
