// Published plans against the best that search finds on the same GPUs.
#pragma once

#include "planner/plan/plan_fields.hpp"
#include "simulator/published/validate.hpp"

namespace moe::published {

struct Improvement {
    std::string run_id;
    double published_tflops = 0.0;          // predicted for the published plan, TFLOP/s per GPU by the plan's own rule
    plan::Plan best;                        // the published plan itself where search finds nothing faster
    search::Estimate estimate;              // the best plan's; never slower than the published plan's
    std::vector<plan::FieldChange> changes; // changes from the published plan to the best
    std::int64_t candidates = 0;            // that were weighed
    double seconds = 0.0;                   // that the search took
};

// Runs, for each prediction that was not skipped, a search over its model, GPUs, batch, precision and stack, with what
// search does not choose (offload, capacity, ...) as in the row.
std::vector<Improvement> improve(const std::vector<Prediction>& predictions, const machine::Coefficients& coefficients,
                                 const std::function<void(std::size_t)>& progress);

} // namespace moe::published
