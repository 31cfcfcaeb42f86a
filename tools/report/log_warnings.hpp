// What makes a training log a poor measure of a plan, in words for the user.
#pragma once

#include "planner/plan/fwd.hpp"
#include "tools/report/log_comparison.hpp"

#include <string>
#include <vector>

namespace moe::tools {

// One line for each: the job's own figures that are not the plan's; tokens, FLOPs, peak rate and memory that do not fit
// the plan; too few iterations. used: the lines that the median of `comparison` is of, whose other figures are set.
std::vector<std::string> log_warnings(const plan::Plan& plan, const TrainingLog& log,
                                      const std::vector<const LogValues*>& used, const LogComparison& comparison);

} // namespace moe::tools
