// The published runs that are most like a plan: what was measured, and what is predicted for them.
#pragma once

#include "planner/plan/plan.hpp"

#include <string>
#include <vector>

namespace moe::published {

struct NearRun {
    std::string run_id;
    double measured = 0.0, predicted = 0.0; // TFLOPS/GPU; predicted with all published runs fitted
    std::vector<std::string> differs_in;    // fields of the plan, workload and machine first
};

// At most `most` runs of the plan's kind of model, the most alike first: model, machine, precision, GPUs, batch and
// sequence count most, then the number of plan fields that differ. Runs come from profiles/runs, predictions from
// profiles/runs/residuals.json; none without these files.
std::vector<NearRun> nearest_published(const plan::Plan& plan, std::size_t most);

} // namespace moe::published
