// The test of anchors on published rows: one row of a model and a system is shown, the others are predicted.
#pragma once

#include "tools/fit/problem.hpp"

#include <string>
#include <vector>

namespace moe::tools {

struct AnchoredGroup { // rows of tiers A and B of one model on one system
    std::string model, system;
    int rows = 0;
    double before = 0.0;                        // mean |error| of the rows, predicted without any of them
    double after = 0.0;                         // the same with one of the others as an anchor, over all anchors
    int pairs = 0;                              // an anchor and a row of the same stack
    double same_before = 0.0, same_after = 0.0; // means over these pairs
};

// Groups of three rows or more. Without the group's rows, coefficients are one Gauss-Newton step away from those that
// are stored, and only the other rows are neighbours; then anchored() sees one row. Prices are linear in x = log(value
// / stored), with derivatives that are taken once.
std::vector<AnchoredGroup> anchored_groups(const FitProblem& problem, const published::NeighbourModel& model);

// The Markdown table of profiles/runs/NEIGHBOURS.md, means below it.
std::string anchored_table(const std::vector<AnchoredGroup>& groups);

} // namespace moe::tools
