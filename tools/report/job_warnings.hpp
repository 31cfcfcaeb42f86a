// What makes a training log or a profile a poor measure of a plan, in words for the user: one line each.
#pragma once

#include "planner/plan/fwd.hpp"
#include "tools/report/log_comparison.hpp"
#include "tools/report/profile_comparison.hpp"

#include <string>
#include <vector>

namespace moe::tools {

// The job's own figures that are not the plan's; tokens, FLOPs, rates and memory that do not fit the plan; too few
// iterations. used: the lines that the median of `comparison` is of, whose other figures are set.
std::vector<std::string> log_warnings(const plan::Plan& plan, const TrainingLog& log,
                                      const std::vector<const LogValues*>& used, const LogComparison& comparison);

// Rates and memory that do not fit the plan; kinds of ops that take much of the plan's step and of which the profile
// has no kernel; many unmatched kernels. tflops: of a GPU, by the measured step and the plan's own FLOPs.
std::vector<std::string> profile_warnings(const plan::Plan& plan, const DeviceProfile& profile,
                                          const ProfileComparison& comparison, double tflops);

} // namespace moe::tools
