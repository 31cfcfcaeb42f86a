// The published runs that are most like a plan: what was measured, and what is predicted for them.
#pragma once

#include "planner/plan/plan.hpp"
#include "simulator/published/run_plan.hpp"
#include "simulator/published/runs.hpp"

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace moe::published {

struct NearRun {
    std::string run_id;
    double measured = 0.0, predicted = 0.0; // TFLOPS/GPU; predicted with all published runs fitted
    std::vector<std::string> differs_in;    // fields of the plan, workload and machine first
};

// The runs of profiles/runs for which profiles/runs/residuals.json has predictions; none without these files. They are
// read once for all plans that are asked about.
class PublishedRuns {
public:
    PublishedRuns();
    // At most `most` runs of the plan's kind of model, the most alike first: model, machine, precision, GPUs, batch and
    // sequence count most, then the number of plan fields that differ.
    std::vector<NearRun> nearest(const plan::Plan& plan, std::size_t most);

private:
    struct Known {
        Run run;
        double fitted = 0.0;               // log(predicted / published)
        std::optional<PlannedRun> planned; // once it was near to a plan
    };
    std::vector<Known> runs_;
    std::optional<RunPlanner> planner_; // where there are runs
};

} // namespace moe::published
