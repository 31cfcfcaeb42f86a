// The choice of the plan that takes the place of one that overflowed.
#include "planner/plan/overflow_retry.hpp"

#include "planner/plan/plan_choices.hpp"
#include "planner/plan/plan_limits.hpp"
#include "planner/plan/stack_traits.hpp"

namespace moe::plan {

bool may_overflow(const Plan& plan) {
    return stack_traits(plan).retries_overflow && plan.capacity > 0.0 && plan.ep > 1 && has_experts(plan);
}

std::optional<Plan> overflow_retry_plan(const Plan& plan) {
    if (!may_overflow(plan)) return std::nullopt;
    Plan again = plan;
    again.capacity = limits::most_capacity; // The worst case caps it, and scalars stay where they are.
    again.recompute = recompute::full;
    again.offload &= offload::states;
    again.ep_overlap = false; // A merged pair needs the workspace of both.
    return again;
}

} // namespace moe::plan
