// The fit: its solver on problems with known answers, and its stored figures held to what is predicted today.
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/published/ratios.hpp"
#include "tests/support/draws.hpp"
#include "tests/support/nearly.hpp"
#include "tools/fit/ablation.hpp"
#include "tools/fit/accuracy.hpp"
#include "tools/fit/problem.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
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

TEST_CASE("work in parallel may have parallel work of its own") {
    std::atomic<int> sum{0};
    in_parallel(20, [&](std::size_t i) { in_parallel(5, [&](std::size_t j) { sum += static_cast<int>(i * 5 + j); }); });
    CHECK(sum == 99 * 100 / 2);
}

TEST_CASE("least squares: derivatives take what changes along one parameter where that is known") {
    LeastSquares problem = line(1e3);
    std::atomic<int> along{0};
    problem.residuals_along = [&](const std::vector<double>& x, std::size_t j, const std::vector<double>& known) {
        along += static_cast<int>(j) + 1;
        std::vector<double> moved = problem.residuals(x);
        moved[0] = known[0]; // taken as it is
        return moved;
    };
    const Jacobian jacobian = differences(problem, {1.0, 0.5}, problem.residuals({1.0, 0.5}));
    CHECK(along == 3);
    CHECK(jacobian[0][0] == 0.0);
    CHECK(jacobian[3][0] == nearly(1.0).epsilon(1e-6));
    CHECK(jacobian[3][1] == nearly(3.0).epsilon(1e-6));
}

TEST_CASE("rows of stacks that do not name a coefficient need no new price where it moves" *
          doctest::skip(sanitized())) {
    const FitProblem problem({"hybridep.blackwell.node"}, {{"hybridep.row", 0.0}});
    REQUIRE(problem.names() == std::vector<std::string>{"hybridep.blackwell.node"});
    CHECK(problem.coefficients(problem.stored()).at("hybridep.row").value == 0.0);
    const LeastSquares squares = problem.squares(&published::Prediction::family, "");
    const std::vector<double> known = squares.residuals(problem.stored());
    const std::vector<double> errors = log_errors(problem.rows());
    for (std::size_t i = 0; i < known.size(); ++i) CHECK(known[i] == nearly(errors[i]).epsilon(1e-9));
    const std::vector<double> moved{problem.stored().front() + 0.1};
    const std::vector<double> all = squares.residuals(moved), some = squares.residuals_along(moved, 0, known);
    CHECK(all == some);
    std::size_t changed = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
        if (all[i] == known[i]) continue;
        ++changed;
        const std::string& system = problem.rows()[i].system;
        CHECK_MESSAGE((system == "B200" || system == "B300"), problem.rows()[i].run_id);
    }
    CHECK(changed >= 10);
}

TEST_CASE("rows of one system and stack are predicted alone as they are among all" * doctest::skip(sanitized())) {
    const FitProblem problem;
    const auto field = &published::Prediction::system_and_stack;
    const std::string value = problem.rows().front().*field;
    const std::vector<published::Prediction> alone = problem.predict(problem.stored(), field, value);
    auto next = alone.begin();
    for (const published::Prediction& row : problem.rows()) {
        if (row.*field != value) continue;
        REQUIRE(next != alone.end());
        CHECK(next->run_id == row.run_id);
        CHECK(next->error == nearly(row.error).epsilon(1e-9));
        CHECK(next->plan.mbs == row.plan.mbs);
        CHECK(next->plan.recompute == row.plan.recompute);
        ++next;
    }
    CHECK(next == alone.end());
    CHECK(!alone.empty());
    CHECK(alone.size() < problem.rows().size());
}

TEST_CASE("terms that are left out have a value that says nothing, with which every stack can be read") {
    machine::Coefficients coefficients = machine::load_coefficients();
    int terms = 0;
    for (auto& [name, c] : coefficients) {
        const std::optional<double> value = neutral(name);
        if (!value) continue;
        ++terms;
        CHECK_MESSAGE(c.spread > 0.0, name);
        CHECK_MESSAGE(*value != c.prior, name);
        c.value = *value;
    }
    CHECK(terms == 26);
    CHECK_FALSE(neutral("gemm.blackwell.bf16"));
    for (const char* hardware : {"h100", "h100-hbm2e", "b200", "gb200-nvl72", "gb300-nvl72"})
        for (const std::string& name : stack::stack_names()) {
            if (name == "moe-plan") continue;
            CAPTURE(name);
            CHECK_NOTHROW(stack::load_stack(name, machine::load_hardware(hardware), coefficients));
        }
    CHECK_THROWS_WITH_AS(print_ablation({"gemm.blackwell.bf16"}, 1), doctest::Contains("cannot be priced"), Error);
}

// Under the sanitizers the README's claim predicts the same runs.
TEST_CASE("profiles/runs/ACCURACY.md is what the stored residuals and today's predictions say" *
          doctest::skip(sanitized())) {
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

TEST_CASE("the accuracy that the README of the project claims holds" * doctest::skip(sanitized())) {
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
