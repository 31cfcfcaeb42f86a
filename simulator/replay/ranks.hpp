// One rank of a simulated step: its Program, the price of every op, and the rows that playing it leaves behind.
#pragma once

#include "planner/memory/memory.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/stack_traits.hpp"
#include "planner/program/timeline.hpp"
#include "planner/search/pricing.hpp"
#include "planner/stack/fwd.hpp"
#include "simulator/cost/cost.hpp"
#include "simulator/replay/max_plus.hpp"

#include <memory>
#include <vector>

namespace moe::replay {

class OpSteps;

struct RankRun {
    int rank = 0;       // global rank
    int represents = 1; // equal ranks that it stands for
    std::shared_ptr<const program::Program> program;
    std::shared_ptr<const cost::ProgramCosts> costs;
    std::shared_ptr<const OpSteps> steps; // of program and costs, where several runs share them; null: made here
    std::shared_ptr<const memory::Reuses> reuses; // null: memory is no reason to wait
    cost::ContentionPrice contention;
    std::vector<program::TimelineRow> rows; // rows in the order of execution, which is that of start on each stream
    std::vector<char> host_bound; // whether the op of a row started when the host issued it, not when inputs were there
    double host_seconds = 0.0;    // seconds until the host had issued everything
};

// Slots that run side by side under EP overlap (a forward and a backward of another micro-batch); without it one slot
// each.
struct Unit {
    std::vector<int> lanes[2]; // indices into Program::slots, in order; the second may be empty
    std::vector<bool> second;  // whether each op in running order is the second lane's; empty: whoever can
    bool merged() const { return !lanes[1].empty(); }
};
// in_order: as Program::merges says, which is how our engine runs it.
std::vector<Unit> units_of(const program::Program& program, bool in_order);

// True where the plan's Programs run in an arena and in the order that they say, as ours do; published stacks allocate
// as they go.
inline bool runs_in_arena(const plan::Plan& plan) { return plan::stack_traits(plan).runs_in_arena; }
// The reuses of such a Program, which is one of `plan`; null for others.
inline std::shared_ptr<const memory::Reuses> reuses_in(const plan::Plan& plan, const program::Program& program) {
    return runs_in_arena(plan) ? std::make_shared<const memory::Reuses>(memory::reuses_of(program)) : nullptr;
}

// GPUs: one run per pipeline rank; streams, hosts and messages between stages. Throws Error (failure) on a deadlock.
void play_devices(const stack::Stack& stack, std::vector<RankRun>& runs);
// Layers of all micro-batches take turns with it: offloaded rows leave from there and come back there.
inline bool is_buffer(const program::Tensor& t) { return t.storage == program::Storage::activation && t.chunk < 0; }
// Plays one run whose units are given, as play_devices() would, for segments. Its clocks are at `start` (streams that
// Clocks::ring does not speak of at start.device); tensor `late` (its root) is there at `when`, everything else has
// been there since 0.
void play_segment(const stack::Stack& stack, RankRun& run, const std::vector<Unit>& units, const StreamClocks& start,
                  program::TensorId late = program::no_tensor, double when = 0.0);
// CPU: every rank is a thread that needs one of `hardware.cores` permits to run (the engine's rule,
// engine/base/cores.hpp).
void play_cores(const plan::Plan& plan, std::vector<RankRun>& runs);

// The parts of the step on one rank; they add up to `step_seconds`.
search::Breakdown breakdown_of(const plan::Plan& plan, const RankRun& run, double step_seconds);

} // namespace moe::replay
