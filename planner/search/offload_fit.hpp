// Offload as a way into memory: the sets of modules that a plan has to move to the host so that it fits.
#pragma once

#include "planner/plan/plan.hpp"
#include "planner/search/pricing.hpp"
#include "planner/stack/fwd.hpp"

#include <vector>

namespace moe::search {

struct OffloadFit {
    plan::Plan plan;
    double link_seconds = 0.0; // seconds of a step that the host's link is busy at its full bandwidth; about
};

// Variants with offload of a plan that offloads nothing and does not fit: with activations alone and with the
// optimizer's states too, the sets that move fewest bytes among those that fit, or leave a tenth of memory free, at
// most one of each; what is not moved costs nothing. Empty where the stack, or memory, has no place for any.
std::vector<OffloadFit> offloaded_to_fit(const plan::Plan& plan, const stack::Stack& stack, Estimator& estimator);

} // namespace moe::search
