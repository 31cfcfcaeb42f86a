// The fit of what corrects predictions by runs nearby, and tables of what it gains for runs that it was not shown.
#pragma once

#include "simulator/published/neighbours.hpp"

#include <string>
#include <vector>

namespace moe::tools {

// Rows taken away together: what is expected of each from all others.
struct LeftOut {
    std::string name;                     // of the way to leave out: "row", "model", "family", "system", ..
    std::vector<double> target;           // log(predicted / published) by a fit that had not seen them, by row
    std::vector<double> mean, deviation;  // of g for each row, see simulator/published/neighbours.hpp
    std::vector<bool> new_release;        // by row: none of its system and stack stays
    std::vector<std::vector<int>> groups; // rows that leave together
};
// By row, model, family, system, and system with release. Of models and families the target is that of a fit without
// the family, of systems that without the system, of systems with a release that without rows of both; of single rows
// that of the fit of all rows.
std::vector<LeftOut> leave_out(const published::NeighbourModel& model, const std::vector<published::Residual>& rows);

// Deviation and distances with which left-out rows are most likely (by row, family and system alike; Student's t of 4
// degrees of freedom, since some rows are wrong), then what the deviation of what remains adds for rows whose release
// has not been seen on their system, then the spreads and the coverage. `rows` tell their workloads.
published::NeighbourModel fit_neighbours(const std::vector<published::Residual>& rows, const std::string& source);

// Rows of tiers A and B within their intervals by each way to leave out; spreads are those of the rows that stay.
std::vector<published::LeftOutCoverage> coverage_of(const published::NeighbourModel& model,
                                                    const std::vector<published::Residual>& rows);

// profiles/runs/NEIGHBOURS.md: errors before and after by each way to leave out, coverage and width of intervals.
std::string neighbours_document(const published::NeighbourModel& model, const std::vector<published::Residual>& rows);

} // namespace moe::tools
