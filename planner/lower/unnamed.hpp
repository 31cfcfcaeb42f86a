// Lowering for those who play or measure a Program and show nothing of it.
#pragma once

#include "planner/plan/fwd.hpp"
#include "planner/program/program.hpp"

namespace moe::lower {

// The Program of lower(), whose tensors have no names and which lists no parameters.
program::Program lower_unnamed(const plan::Plan& plan, int pipeline_rank);

} // namespace moe::lower
