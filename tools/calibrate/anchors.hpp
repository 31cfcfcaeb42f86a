// Coefficients that have seen a few measured runs: the posterior of those that published runs have fitted.
//
// log(predicted / measured) of the user's runs is J x + g + noise: J x is what coefficients do that move by x, each
// with the standard error that the fit of the published runs has left it, g the process of
// simulator/published/neighbours.hpp given the published runs. Both are told apart by least squares with the covariance
// of g and noise; what remains of the runs then joins the runs that condition g.
#pragma once

#include "planner/machine/coefficients.hpp"
#include "planner/plan/plan.hpp"
#include "planner/stack/anchored.hpp"
#include "simulator/published/neighbours.hpp"
#include "tools/calibrate/least_squares.hpp"

#include <string>
#include <vector>

namespace moe::tools {

// Parameters x that a few runs move from 0: x has the standard errors `error`, the runs' log errors at x are
// log_errors(x), and g is known from `neighbours`. The result's x and error are those of the posterior.
struct AnchorProblem {
    Residuals log_errors; // log(predicted / measured) by run
    std::vector<double> error;
    std::vector<stack::Workload> workloads; // of the runs
};
Solution anchored(const AnchorProblem& problem, const published::Neighbours& neighbours);

struct MeasuredPlan {
    std::string run_id;
    plan::Plan plan;
    double tflops_per_gpu = 0.0; // measured, by the plan's own FLOPs
};

struct Anchoring {
    struct Run {
        std::string run_id;
        double measured = 0.0;            // TFLOPS/GPU
        double before = 0.0, after = 0.0; // predicted, corrected by runs nearby; after: with the runs themselves
        published::Interval interval_before, interval_after;
    };
    struct Moved {
        std::string name, unit;
        double before = 0.0, after = 0.0;             // values
        double error_before = 0.0, error_after = 0.0; // standard errors of their logarithms
    };
    stack::AnchoredStack stack;
    std::vector<Run> runs;
    std::vector<Moved> coefficients; // all that could move, those that moved most for their error first
};
// `stack`: a published one, by name. Throws Error (bad_input) where it is not, or holds anchors already.
Anchoring anchor(const std::string& stack, const std::vector<MeasuredPlan>& runs, const std::string& source);

} // namespace moe::tools
