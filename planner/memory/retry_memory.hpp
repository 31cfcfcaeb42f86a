// Memory of a step and of the one that is run in its place when routed rows overflow (planner/plan/overflow_retry.hpp).
#pragma once

#include "planner/memory/memory.hpp"
#include "planner/plan/fwd.hpp"
#include "planner/program/fwd.hpp"

namespace moe::memory {

// plan_memory() of a Program that was lowered from `plan`, with room in the same arena for the Program that is run in
// its place, counted as workspace.
MemoryPlan plan_memory_with_retry(const plan::Plan& plan, const program::Program& program);

// True where both have weights, gradients, optimizer states, inputs and scalars at the same places.
bool same_states(const program::Program& a, const MemoryPlan& memory_a, const program::Program& b,
                 const MemoryPlan& memory_b);

} // namespace moe::memory
