// The facts that explain and the report know of one plan, and of one plan against another.
#pragma once

#include "planner/search/feasibility.hpp"
#include "planner/search/whatif.hpp"
#include "simulator/pricing/skewed_estimator.hpp"
#include "simulator/published/corrected_estimator.hpp"
#include "simulator/replay/walls.hpp"
#include "tools/report/comparison.hpp"

#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace moe::tools {

struct Explanation {
    plan::Plan plan;
    replay::Simulation simulation; // op by op, with rows
    replay::Walls walls;
    published::IntervalResult interval;              // of the simulation's TFLOPS/GPU
    std::optional<published::Correction> correction; // that is in all step times but those of `walls`
    pricing::Skew skew;
    search::Estimate base; // by the estimator that priced `deltas` and `front`
    std::vector<search::WhatIf> deltas;
    std::vector<std::optional<double>> certainties; // of deltas: probability that a gain or loss has the sign predicted
    std::vector<search::FrontPoint> front;
};
// The plan must be sound and within the stack, the simulation its own with rows, not yet corrected. `slots`: see
// pricing::skew_of().
Explanation explain_plan(const plan::Plan& plan, const stack::Stack& stack, replay::Simulation simulation,
                         published::Corrector& corrector, int slots = pricing::usual_spare_slots);

// "80% interval 912 to 1204 TFLOPS/GPU (cross-validated on 158 published runs)", or why there is none.
std::string interval_text(const published::IntervalResult& result);

// Step, rate and memory at mean, p50 and p99 of a skewed plan, how often its capacity overflows, and what copies of hot
// experts would give; several lines.
std::string skew_text(const plan::Plan& plan, const pricing::Skew& skew);
// The last part of it.
std::vector<std::string> replication_lines(const pricing::Replication& replication);

// Seconds of the slowest rank's step beyond what its model FLOPs take at peak, by cause, largest first. A class of ops
// loses what it takes beyond the machine's peak rate for it.
std::vector<std::pair<std::string, double>> losses(const Explanation& e);

// The parts of a breakdown with the names that people read, in the order in which they are shown.
std::vector<std::pair<const char*, double>> parts_of(const search::Breakdown& breakdown);

struct Difference { // of one quantity in two plans
    std::string name;
    double here = 0.0, there = 0.0;
};
struct Versus {
    std::vector<plan::FieldChange> fields; // from this plan to the other
    search::Estimate there;
    std::vector<Difference> parts;  // seconds of the step
    std::vector<Difference> kinds;  // busy seconds per rank by op kind, widest difference first
    std::vector<Difference> memory; // bytes by class on the rank that holds most
};
Versus compare_plans(const Explanation& here, const Explanation& there);

// line: the one with which search refuses.
std::string infeasibility_document(const search::Infeasibility& why, const std::string& line);
std::string explanation_document(const Explanation& e, const Versus* versus);

} // namespace moe::tools
