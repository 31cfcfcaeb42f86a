// Rules of a plan's choices: what runs on the machine, what excludes what, and what execute cannot run.
#pragma once

#include "planner/base/error.hpp"
#include "planner/plan/plan.hpp"

#include <utility>

namespace moe::plan {

template <class... Args>
PlanFault fault(const char* counter, fmt::format_string<Args...> text, Args&&... args) {
    return {counter, fmt::format(text, std::forward<Args>(args)...)};
}

bool has_experts(const Plan& plan);

// The part of check_plan() that asks for degrees, batch, schedule, stages and rank order alone: whatever else the plan
// chooses, these go together or do not.
PlanFault check_degrees(const Plan& plan);

// Precision, recomputation, offload, communication and graphs: what check_plan() asks behind check_degrees().
PlanFault check_choices(const Plan& plan);

// The recomputed modules against the model's alone, which search asks before it looks at any mapping.
PlanFault check_recompute(const Plan& plan);

// The first width of a linear layer that our kernels of FP8 do not take.
PlanFault check_fp8_widths(const Plan& plan);

// The first choice that only the simulator knows, empty when execute runs them all.
PlanFault check_executable(const Plan& plan);

} // namespace moe::plan
