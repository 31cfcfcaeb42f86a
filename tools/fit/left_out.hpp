// Cross-validation: rows predicted by fits that have not seen their family, their system or their release.
#pragma once

#include "tools/fit/problem.hpp"

#include <string>
#include <vector>

namespace moe::tools {

// Every row predicted with the coefficients of a fit that has not seen what the row has in this field. `all`: the fit
// of all rows with its derivatives, or those of a point nearby.
std::vector<published::Prediction> left_out(const FitProblem& problem, const Solution& all,
                                            const std::string published::Prediction::*field);

} // namespace moe::tools
