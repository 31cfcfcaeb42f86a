// Plays a lowered segment alone: from each clock of its start, among others like it, and as a step's first backward.
#include "simulator/estimate/segment_cost.hpp"

#include "planner/lower/passes/first_gradients.hpp"
#include "simulator/replay/ranks.hpp"

#include <algorithm>

namespace moe {
namespace {

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
          std::shared_ptr<const Reuses> reuses, BesideCommunication beside, int slot)
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
    TensorId message() const { return program_->io.segment_message(unit_.lanes[0].front()); }
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
    BesideCommunication beside_;
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
        BucketUse use{{b.domain, b.elements, b.group, b.group_size, dtype, -1, 0, b.quantizable},
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

SegmentCost segment_cost(const CostModel& model, SegmentId id) {
    const Plan& plan = model.plan();
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
    const auto costs = std::make_shared<const ProgramCosts>(price(model, *program));

    SegmentCost result;
    const std::shared_ptr<const Reuses> reuses = reuses_in(plan, *program);
    const BesideCommunication beside = model.beside_communication();
    const Alone alone[2] = {{model.stack(), program, costs, reuses, beside, 0},
                            {model.stack(), program, costs, reuses, beside, 1}};
    RankRun ahead;
    for (int slot = 0; slot < 2; ++slot) {
        SegmentTime& time = slot == 0 ? result.forward : result.backward;
        ahead = alone[slot].play({-far_ahead, 0.0, 0.0});
        time.device = end_of(ahead);
        time.parts = breakdown_of(plan, ahead, time.device);
        time.passage = alone[slot].passage();
        if (alone[slot].runs_ahead()) run_on(time, period(time.passage));
    }
    const Alone first_backward(model.stack(), program, costs, reuses, beside,
                               static_cast<int>(program->templates.size()) - 1);
    result.first_backward = result.backward;
    if (program->templates.size() > 2) {
        SegmentTime& time = result.first_backward;
        time.device = end_of(first_backward.play({-far_ahead, 0.0, 0.0}));
        time.passage = first_backward.passage();
        if (first_backward.runs_ahead()) run_on(time, period(time.passage));
    }
    result.uses = uses_of(*program, first, alone[0], first_backward, ahead);
    return result;
}

} // namespace moe
