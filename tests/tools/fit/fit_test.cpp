// The fit: its solver on problems with known answers, and its stored figures held to what is predicted today.
#include "planner/base/files.hpp"
#include "simulator/published/ratios.hpp"
#include "tests/support/draws.hpp"
#include "tests/support/nearly.hpp"
#include "tools/fit/accuracy.hpp"
#include "tools/fit/problem.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <map>

namespace {

using namespace moe;
using namespace moe::tools;

// Rows y = a + b t with one outlier; parameters a, b.
LeastSquares line(double spread) {
    LeastSquares p;
    p.residuals = [](const std::vector<double>& x) {
        std::vector<double> r;
        for (int t = 0; t < 20; ++t) r.push_back(x[0] + x[1] * t - (1.0 + 0.5 * t + (t == 7 ? 100.0 : 0.0)));
        return r;
    };
    p.weight.assign(20, 1.0);
    p.spread = {spread, spread};
    return p;
}

} // namespace

TEST_CASE("least squares: a line is found in spite of an outlier, priors pull where nothing is known") {
    const Solution loose = solve(line(1e3), {0.0, 0.0}, nullptr);
    CHECK(loose.x[0] == nearly(1.0).epsilon(0.05));
    CHECK(loose.x[1] == nearly(0.5).epsilon(0.01));
    CHECK(loose.error[1] > 0.0);
    const Solution tight = solve(line(1e-3), {0.0, 0.0}, nullptr);
    CHECK(std::abs(tight.x[0]) < 0.01);
    LeastSquares without = line(1e3);
    without.weight[7] = 0.0;
    const Solution exact = solve(without, {0.0, 0.0}, nullptr);
    CHECK(exact.x[0] == nearly(1.0).epsilon(1e-4));
    CHECK(exact.objective < 1e-4);
    const Solution refit = solve(without, exact.x, &loose.jacobian);
    CHECK(refit.x[1] == nearly(0.5).epsilon(1e-4));
}

// Under the sanitizers the README's claim predicts the same runs.
TEST_CASE("profiles/runs/ACCURACY.md is what the stored residuals and today's predictions say" *
          doctest::skip(sanitized)) {
    const FitProblem problem;
    const std::string folder = profiles_folder() + "/runs", path = folder + "/residuals.json";
    const std::string residuals = read_file(path);
    const CrossValidation rows = stored_rows(problem.rows(), residuals, path);
    CHECK_MESSAGE(residuals_json(rows) == residuals, "run build/tools/fit/fit-stacks --tables");
    CHECK_MESSAGE(published::ratio_errors_json(published::ratio_errors(rows.left_family)) ==
                      read_file(folder + "/ratios.json"),
                  "run build/tools/fit/fit-stacks --tables");
    CHECK_MESSAGE(accuracy_document(rows, machine::load_coefficients()) == read_file(folder + "/ACCURACY.md"),
                  "run build/tools/fit/fit-stacks --tables");
}

TEST_CASE("the accuracy that the README of the project claims holds") {
    const FitProblem problem;
    std::map<std::string, published::ValidationSummary> by;
    for (const auto& [name, summary] : published::summarize_by(problem.rows(), &published::Prediction::tier_and_kind))
        by[name] = summary;
    const published::ValidationSummary& moe = by["A MoE"];
    CHECK(moe.predicted >= 94);
    CHECK(moe.mape <= 0.08);
    CHECK(std::abs(moe.bias) <= 0.02);
    CHECK(moe.within_10_percent >= 0.75);
    CHECK(moe.kendall_tau >= 0.85);
}
