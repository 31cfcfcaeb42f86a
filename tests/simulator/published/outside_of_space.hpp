// Whether a plan lies in the space that a search of its request explores, and what of it does not.
#pragma once

#include "planner/search/search.hpp"

#include <string>
#include <vector>

namespace moe::search {

// A field of a plan that no candidate of its request has so.
struct OutsideField {
    std::string field; // by its --fix name; "tp+cp+dp+pp+ep+etp" where the degrees together are no candidate
    std::string value; // the plan's
    std::string words; // what the space has instead, or what excludes the plan
};

// The fields in which the plan differs from the nearest candidate of refined_search(), for the request of the plan's
// model, hardware, GPUs, batch and precision; empty where it is a candidate. What a request says and search does not
// choose is taken from the plan: routing and the router's training, layers in BF16, scaling of FP8, precision of
// gradients, determinism. Offload and delayed weight gradients, which refined_search() tries on the plans that it
// finds, are in the space of a stack that has them. No plan is priced, and memory is not looked at.
std::vector<OutsideField> outside_of_space(const plan::Plan& plan, const stack::Stack& stack);

} // namespace moe::search
