// What copies of hot experts would give a plan under skewed routing, at what they cost: a what-if, which no engine here
// runs.
//
// Before each dispatch the copies are planned and the weights of hot experts sent to spare slots of other ranks, again
// before the backward of the experts; gradients of the copies are reduced to their experts beside the backward of
// router and attention. Copies stay within an NVLink domain. Costs are those that UltraEP printed (arXiv 2606.04101,
// and the table of https://github.com/Dots-Infra/UltraEP for 256 experts on 64 ranks).
#pragma once

#include "planner/plan/plan.hpp"
#include "planner/search/pricing.hpp"
#include "planner/stack/fwd.hpp"
#include "simulator/routing/routing.hpp"

#include <functional>
#include <optional>

namespace moe::pricing {

inline constexpr int usual_spare_slots = 2; // of a rank, as in UltraEP's published runs

// Seconds of sending `copies` of an expert of so many bytes from one rank of a domain of `domain` ranks, at `bandwidth`
// bytes/s one way. 706 to 715 of 900 GB/s are reached where the rank sends all of them itself. In domains of more than
// eight some of the receivers may pass it on instead, at 0.55 of that rate (0.19 ms for four to six copies of 37.7 MB).
double copy_seconds(double copies, double bytes, int domain, double bandwidth);
// Seconds of reducing gradients of so many bytes a copy to the rank of the expert, with the few multiprocessors that
// leave room for what computes beside it: 156 to 187 of 900 GB/s.
double reduction_seconds(double copies, double bytes, double bandwidth);

struct Replication {
    int slots = 0;                        // spare ones of a rank
    routing::StepLoads loads;             // with copies
    double copies = 0.0, most_sent = 0.0; // of a layer: in all, and from the rank that sends most
    double slot_bytes = 0.0;              // of a rank: weights and gradients of its slots, which layers take turns with
    // Of one layer and micro-batch, seconds: the plan of the copies, their weights one way, and what of the gradients'
    // reduction finds nothing to hide behind.
    double plan_seconds = 0.0, weight_seconds = 0.0, gradient_seconds = 0.0, exposed_seconds = 0.0;
    double added_seconds = 0.0;     // of the step
    search::Estimate estimate;      // of the step with copies
    double share_of_balanced = 0.0; // of the rate with balanced routing
};

// Prices a plan with given loads.
using Price = std::function<search::Estimate(const plan::Plan& plan)>;

// At the mean of the plan's routing. Empty where nothing would be copied: balanced routing, no EP, a CPU, no NVLink
// between the ranks of a group.
std::optional<Replication> replication_of(const plan::Plan& plan, const stack::Stack& stack, int slots,
                                          const Price& price);

} // namespace moe::pricing
