// Steps that are run again: where routed rows have planned capacity (Plan::capacity) and more came, the step changed no
// weight, and the same step with room for the worst case takes its place.
#pragma once

#include "planner/plan/fwd.hpp"

#include <optional>

namespace moe::plan {

// True where more routed rows can come than the plan's buffers hold. Only our stack has buffers that can overflow: what
// arrives over EP is bounded by nothing else (without EP every copy has its place), and its Programs then tell so
// (ProgramIo::overflow).
bool may_overflow(const Plan& plan);

// The plan of the step that is run again: worst-case buffers, and as little kept as can be, so that it needs hardly
// more memory. Its Programs give the bits of `plan` with worst-case capacity, since neither recomputation nor offload
// changes any. Empty where nothing can overflow.
std::optional<Plan> overflow_retry_plan(const Plan& plan);

} // namespace moe::plan
