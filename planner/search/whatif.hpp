// Questions "what if": the plans that differ from a given one in a single choice, and the front of memory against time
// around it.
#pragma once

#include "planner/plan/plan.hpp"
#include "planner/plan/plan_fields.hpp"
#include "planner/search/pricing.hpp"
#include "planner/stack/fwd.hpp"

#include <string>
#include <vector>

namespace moe::search {

// A plan one choice away from another.
struct WhatIf {
    plan::FieldChange change;
    // Fields that moved along so that the plan stays sound: the other axis of the same factoring, the cut into stages.
    std::vector<plan::FieldChange> along;
    plan::Plan plan;
    Estimate estimate;
    double gain = 0.0;      // tflops_per_gpu over that of the plan asked about, minus 1
    std::string impossible; // why there is no such plan; empty: `plan` and `estimate` hold
};

// A degree goes to the nearest value above and below that gives a sound plan, another axis of the same factoring taking
// up the difference (TP: DP, else CP; CP: DP, else TP; PP: DP and EDP, else EP; EP: EDP, else ETP; ETP: EDP, else EP);
// every other choice takes each of its other values, sets gain or lose one member. Where the stages change, the even
// and the balanced cut are tried and the faster one counts. Plans that the stack does not offer are left out, degrees
// without a sound neighbour are kept with the reason. Sorted: plans that fit first, by gain.
std::vector<WhatIf> what_ifs(const plan::Plan& plan, const stack::Stack& stack, Estimator& estimator);

// A point of the memory-time plane: the plan's mapping with other choices of what is kept, recomputed or moved away.
struct FrontPoint {
    std::vector<plan::FieldChange> changes; // against the plan asked about, empty = itself
    plan::Plan plan;
    Estimate estimate;
};
// The front of the plan's mapping with every recompute set of the stack, optimizer moments, optimizer offload, FSDP and
// micro-batch size up to four times its own, and with each activation offloaded alone:
std::vector<FrontPoint> memory_front(const plan::Plan& plan, const stack::Stack& stack, Estimator& estimator);

} // namespace moe::search
