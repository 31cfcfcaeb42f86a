// What a Program takes from its trainer and gives back to it: tokens, scalars, sums over layers.
#pragma once

#include "planner/lower/chunk.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/program.hpp"

#include <vector>

namespace moe::lower {

// Inputs, losses, norms and hyperparameters of a step, all but those of single layers.
void add_io(program::Program& program, const plan::Plan& plan);

// Loads and losses of all routers of a rank, and losses of its indexers: views of one tensor that is summed over the
// ranks at once. Other stacks count what their software needs, ours whatever a run reports.
void add_layer_sums(program::Program& program, const plan::Plan& plan, const std::vector<ChunkSpec>& specs);

} // namespace moe::lower
