// Plays a lowered segment alone: from each clock of its start, among others like it, and as a step's first backward.
#include "simulator/estimate/segment_cost.hpp"

#include "planner/lower/passes/first_gradients.hpp"
#include "simulator/replay/op_steps.hpp"
#include "simulator/replay/ranks.hpp"

#include <algorithm>

namespace moe::estimate {
namespace {

double end_of(const replay::RankRun& run) {
    double end = 0.0;
    for (const program::TimelineRow& row : run.rows) end = std::max(end, row.end);
    return end;
}

// Plays one direction of a segment as the only work of a rank. Micro-batch 0 for one direction and 1 for the other keep
// their tensors apart.
class Alone {
public:
    Alone(const stack::Stack& stack, std::shared_ptr<const program::Program> program,
          std::shared_ptr<const cost::ProgramCosts> costs, std::shared_ptr<const replay::OpSteps> steps,
          std::shared_ptr<const memory::Reuses> reuses, cost::ContentionPrice contention, int slot)
        : stack_(stack),
          program_(std::move(program)),
          costs_(std::move(costs)),
          steps_(std::move(steps)),
          reuses_(std::move(reuses)),
          contention_(contention) {
        unit_.lanes[0] = {slot};
        for (const program::Op& op : program_->templates[static_cast<std::size_t>(slot)].ops) {
            rings_ = rings_ || op.kind == program::OpKind::ring_exchange;
            copies_ = copies_ || op.stream == program::Stream::host;
        }
    }

    // Rings of context parallelism send, and stashed or offloaded rows come and go, while other layers run.
    bool runs_ahead() const { return rings_ || copies_; }

    replay::RankRun play(const replay::StreamClocks& start, program::TensorId late = program::no_tensor) const {
        replay::RankRun run;
        run.program = program_;
        run.costs = costs_;
        run.steps = steps_;
        run.reuses = reuses_;
        run.contention = contention_;
        replay::play_segment(stack_, run, {unit_}, start, late, replay::far_ahead);
        return run;
    }

    replay::MaxPlusMatrix max_plus() const {
        const double now = replay::far_ahead, ring = runs_ahead() ? 0.0 : now;
        replay::MaxPlusMatrix p;
        p.from_host = from_now({now, 0.0, 0.0});
        p.from_device = from_now({0.0, now, ring}, message());
        if (runs_ahead()) p.from_ring = from_now({0.0, 0.0, now});
        p.from_message = message() == program::no_tensor ? p.from_device : from_now({}, message());
        return p;
    }
    replay::StreamClocks after(program::TensorId late) const { return from_now({}, late); }

private:
    // The message that the neighbour sends, see lower_segment().
    program::TensorId message() const { return program_->io.segment_message(unit_.lanes[0].front()); }
    // The clocks at the end, from those at far_ahead; a clock that is not past it does not depend on them.
    replay::StreamClocks from_now(const replay::StreamClocks& start,
                                  program::TensorId late = program::no_tensor) const {
        const replay::RankRun run = play(start, late);
        replay::StreamClocks end{run.host_seconds, start.device, start.ring};
        for (const program::TimelineRow& row : run.rows) {
            // Ops that compute next wait for communication, but not for copies to the host.
            const bool copy = row.stream == program::Stream::host;
            if (!copy) end.device = std::max(end.device, row.end);
            if (copy || (rings_ && row.stream == program::Stream::tensor) || (copies_ && uses_buffer(row)))
                end.ring = std::max(end.ring, row.end);
        }
        for (double* clock : {&end.host, &end.device, &end.ring})
            *clock = *clock < replay::far_ahead ? replay::MaxPlusMatrix::never : *clock - replay::far_ahead;
        return end;
    }

    bool uses_buffer(const program::TimelineRow& row) const {
        const program::Op& op =
            program_->templates[static_cast<std::size_t>(unit_.lanes[0].front())].ops[static_cast<std::size_t>(row.op)];
        const auto shared = [this](program::TensorId id) {
            return id != program::no_tensor && replay::is_buffer(program_->tensors[static_cast<std::size_t>(id)]);
        };
        return std::any_of(op.in.begin(), op.in.end(), shared) || std::any_of(op.out.begin(), op.out.end(), shared);
    }

    const stack::Stack& stack_;
    std::shared_ptr<const program::Program> program_;
    std::shared_ptr<const cost::ProgramCosts> costs_;
    std::shared_ptr<const replay::OpSteps> steps_;
    std::shared_ptr<const memory::Reuses> reuses_;
    cost::ContentionPrice contention_;
    replay::Unit unit_;
    bool rings_ = false, copies_ = false;
};

// Seconds of one among others like it, the host being far ahead.
double period(const replay::MaxPlusMatrix& max_plus) {
    constexpr int others = 6;
    replay::StreamClocks clocks{-replay::far_ahead, 0.0, 0.0};
    double first = 0.0;
    for (int i = 0; i <= others; ++i) {
        clocks = max_plus.after(clocks, clocks.device);
        if (i == 0) first = clocks.device;
    }
    return (clocks.device - first) / others;
}

// The time that a layer saves among others like it is communication.
void run_on(SegmentTime& time, double period) {
    double saved = time.device - period;
    if (saved <= 0.0) return;
    time.device -= saved;
    search::Breakdown& b = time.parts;
    for (double* part : {&b.context, &b.tensor, &b.expert, &b.host, &b.bubble, &b.compute}) {
        const double here = std::min(*part, saved);
        *part -= here;
        saved -= here;
    }
}

// backward: the run of a backward with the host far ahead.
std::vector<BucketUse> uses_of(const program::Program& program, const passes::FirstGradients& first,
                               const Alone& forward, const Alone& first_backward, const replay::RankRun& backward) {
    const auto root = [&program](program::TensorId id) {
        const program::TensorId base = program.tensors[static_cast<std::size_t>(id)].base;
        return base == program::no_tensor ? id : base;
    };
    const auto touches = [&root](const program::Operands& ids, program::TensorId what) {
        return std::any_of(ids.begin(), ids.end(),
                           [&](program::TensorId id) { return id != program::no_tensor && root(id) == what; });
    };
    std::vector<BucketUse> uses;
    const double end = end_of(backward);
    for (const program::Bucket& b : program.buckets) {
        if (b.frozen) continue; // A step does nothing with it.
        const program::Dtype dtype = program.tensors[static_cast<std::size_t>(b.weights)].dtype;
        BucketUse use{{b.domain, b.elements, b.group, b.group_size, dtype, -1, 0, b.quantizable},
                      forward.after(root(b.weights)),
                      first_backward.after(root(b.gradients)),
                      end};
        use.bucket.muon = b.muon.attr; // by which buckets are told apart
        for (const auto& [from, to] : first.unset(b)) use.zeroed += to - from;
        for (const program::TimelineRow& row : backward.rows)
            if (touches(program.templates[1].ops[static_cast<std::size_t>(row.op)].out, b.gradients))
                use.after_final = std::min(use.after_final, end - row.end);
        uses.push_back(use);
    }
    return uses;
}

} // namespace

SegmentCost segment_cost(const cost::CostModel& model, SegmentId id) {
    const plan::Plan& plan = model.plan();
    const auto lowered = std::make_shared<program::Program>(lower::lower_segment(plan, id.kind, id.layer_kind));
    lowered->in_flight = {2};
    lowered->slots = {{0, 0}, {1, 1}};
    passes::FirstGradients first(*lowered);
    if (passes::sets_first_gradients(plan))
        if (auto setting = first.next(lowered->templates[1])) {
            lowered->templates.push_back(std::move(*setting));
            lowered->slots.push_back({2, 1});
        }
    const std::shared_ptr<const program::Program> program = lowered;
    const auto costs = std::make_shared<const cost::ProgramCosts>(cost::price(model, *program));

    SegmentCost result;
    const std::shared_ptr<const memory::Reuses> reuses = replay::reuses_in(plan, *program);
    const cost::ContentionPrice contention = model.contention_price();
    const auto steps = std::make_shared<const replay::OpSteps>(*program, *costs);
    const Alone alone[2] = {{model.stack(), program, costs, steps, reuses, contention, 0},
                            {model.stack(), program, costs, steps, reuses, contention, 1}};
    replay::RankRun ahead;
    for (int slot = 0; slot < 2; ++slot) {
        SegmentTime& time = slot == 0 ? result.forward : result.backward;
        ahead = alone[slot].play({-replay::far_ahead, 0.0, 0.0});
        time.device = end_of(ahead);
        time.parts = replay::breakdown_of(plan, ahead, time.device);
        time.max_plus = alone[slot].max_plus();
        if (alone[slot].runs_ahead()) run_on(time, period(time.max_plus));
    }
    const Alone first_backward(model.stack(), program, costs, steps, reuses, contention,
                               static_cast<int>(program->templates.size()) - 1);
    result.first_backward = result.backward;
    if (program->templates.size() > 2) {
        SegmentTime& time = result.first_backward;
        time.device = end_of(first_backward.play({-replay::far_ahead, 0.0, 0.0}));
        time.max_plus = first_backward.max_plus();
        if (first_backward.runs_ahead()) run_on(time, period(time.max_plus));
    }
    if (program->io.scale_largest != program::no_tensor)
        result.after_scales = alone[0].after(program->io.scale_largest);
    result.uses = uses_of(*program, first, alone[0], first_backward, ahead);
    return result;
}

} // namespace moe::estimate
