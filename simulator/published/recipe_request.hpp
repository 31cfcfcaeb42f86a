// The request that a published recipe answers.
#pragma once

#include "planner/plan/plan.hpp"
#include "planner/search/search.hpp"

namespace moe::published {

// Model, hardware, stack, GPUs, batch, sequence and precision of the plan, with what a user states and search does not
// choose pinned to the plan's: routing and the router's training, layers in BF16, scaling of FP8, precision of
// gradients and of experts, determinism.
search::SearchRequest request_of(const plan::Plan& plan);

} // namespace moe::published
