// The check whether the engine can run a plan, made before anything is allocated.
#pragma once

#include "engine/ops/backend.hpp"
#include "planner/plan/fwd.hpp"

#include <vector>

namespace moe::run {

// Throws Error (bad_input) naming the plan field or model field, and the op, that the back end cannot run; or the ranks
// and ops whose communication does not line up. programs: by pipeline rank.
void check_executable(const plan::Plan& plan, const std::vector<program::Program>& programs,
                      const ops::Backend& backend);

} // namespace moe::run
