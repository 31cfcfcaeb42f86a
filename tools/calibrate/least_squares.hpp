// Robust least squares with priors on the logarithms of coefficients: the mathematics of the fit, free of what is
// fitted.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace moe::tools {

// Residuals of all rows for parameters x; finite. Called from several threads at once.
using Residuals = std::function<std::vector<double>(const std::vector<double>& x)>;

// Derivatives by row, then parameter.
using Jacobian = std::vector<std::vector<double>>;

struct LeastSquares {
    Residuals residuals;
    // Residuals where parameter j alone has moved, from x whose residuals are known; empty: as any others.
    std::function<std::vector<double>(const std::vector<double>& moved, std::size_t j,
                                      const std::vector<double>& residuals)>
        residuals_along;
    std::vector<double> weight; // by row: 1 / variance, 0 leaves the row out
    std::vector<double> spread; // by parameter: standard deviation of its prior around 0
    double huber = 0.1;         // |residual| from which on a row counts linearly
    int iterations = 6;
};

// Calls work(0) ... work(count - 1) on all cores, or, where `work` of another call comes here, on its own thread;
// passes on an exception.
void in_parallel(std::size_t count, const std::function<void(std::size_t)>& work);

struct Solution {
    std::vector<double> x, residuals;
    std::vector<double> error; // standard error of x from the curvature, priors included
    double objective = 0.0;
    Jacobian jacobian; // at x; empty where one was handed in
};

// Gauss-Newton with halved steps from `start`; the derivative is taken by differences of `step`. With `jacobian` given
// it is kept instead of being taken anew: for refits on most of the rows.
Jacobian differences(const LeastSquares& problem, const std::vector<double>& x, const std::vector<double>& residuals);
Solution solve(const LeastSquares& problem, std::vector<double> start, const Jacobian* jacobian);

} // namespace moe::tools
