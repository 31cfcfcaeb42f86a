// The delayed-wgrad pass: weight gradients wait for the communication that only the gradients of activations feed.
#pragma once

#include "planner/program/program.hpp"

namespace moe::passes {

// Moves weight gradients in a backward template (after recomputation). Those of the experts follow the start of the
// exchange that takes their layer's gradients back to the tokens, and those of the first layer's attention follow the
// message to the stage before (arXiv 2603.07685 section 4.2.3). Without such communication the order stays.
void delay_wgrad_pass(program::Template& backward);

} // namespace moe::passes
