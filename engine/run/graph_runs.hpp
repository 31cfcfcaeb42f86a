// The runs of a rank's work that CUDA graphs hold where a plan captures some scopes of a step.
#pragma once

#include "engine/device/arena.hpp"
#include "engine/device/streams.hpp"
#include "planner/plan/fwd.hpp"
#include "planner/program/program.hpp"

#include <cstddef>
#include <vector>

namespace moe::run {

// Work [begin, end) of a StreamOrder, all of it on stream 0 and none of it communication. The first alone waits for
// other streams, and for the last alone others wait: nothing waits longer than it does op by op.
struct GraphRun {
    std::size_t begin = 0, end = 0;
    program::OpWalk walk; // at the first op
    int op = 0;           // its number in the order of OpWalk
    // Records without and with stamps. Runs of the same ops on the same memory share the one without.
    std::size_t plain = 0, stamped = 0;
};

// The longest such runs of two works or more whose ops the plan's graphs hold (program::in_graph), in order.
std::vector<GraphRun> graph_runs(const program::Program& program, const plan::Plan& plan,
                                 const device::StreamOrder& order, const device::Arena& arena);

} // namespace moe::run
