// Prices the runs with moved coefficients and solves for how far these move.
#include "tools/calibrate/anchors.hpp"

#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/pricing/skewed_estimator.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>

namespace moe::tools {
namespace {

// Beyond so many deviations a run counts less: one wrong run shall not move everything.
constexpr double doubted = 2.0;

// The estimates of all runs; those of one machine share an estimator.
std::vector<search::Estimate> priced(const std::vector<MeasuredPlan>& runs, const std::string& stack,
                                     const machine::Coefficients& coefficients) {
    std::map<std::string, std::unique_ptr<pricing::SkewedEstimator>> estimators;
    std::vector<search::Estimate> result;
    for (const MeasuredPlan& run : runs) {
        auto& estimator = estimators[run.plan.hardware->json];
        if (!estimator)
            estimator = std::make_unique<pricing::SkewedEstimator>(
                run.plan.hardware, stack::load_stack(stack, *run.plan.hardware, coefficients));
        result.push_back(estimator->estimate(run.plan));
    }
    return result;
}

machine::Coefficients moved(machine::Coefficients coefficients, const std::vector<std::string>& names,
                            const std::vector<double>& x) {
    for (std::size_t j = 0; j < names.size(); ++j) coefficients[names[j]].value *= std::exp(x[j]);
    return coefficients;
}

// Names of the coefficients that a fit has left an error.
std::vector<std::string> movable(const machine::Coefficients& coefficients) {
    std::vector<std::string> names;
    for (const auto& [name, c] : coefficients)
        if (c.error > 0.0) names.push_back(name);
    return names;
}

published::Neighbours known_neighbours(const stack::Stack& stack) {
    if (stack.executable || stack.published.empty())
        refuse("--stack {}: anchors are for stacks that published runs were fitted with", stack.name);
    if (!stack.anchors.empty())
        refuse("--stack {}: has anchors already: name its base and give all runs at once", stack.name);
    std::optional<published::Neighbours> neighbours = published::load_neighbours(stack);
    if (!neighbours)
        refuse("--stack {}: profiles/runs holds no neighbours.json: run fit-stacks --neighbours", stack.name);
    return std::move(*neighbours);
}

} // namespace

Solution anchored(const AnchorProblem& problem, const published::Neighbours& neighbours) {
    const std::vector<stack::Workload>& at = problem.workloads;
    const double noise = neighbours.model().noise.at("A");
    std::vector<double> expected, lower;
    for (std::size_t i = 0; i < at.size(); ++i) {
        expected.push_back(neighbours.of(at[i]).log_error);
        for (std::size_t j = 0; j <= i; ++j) lower.push_back(neighbours.covariance(at[i], at[j]));
        lower.back() += noise * noise;
    }
    const published::Cholesky covariance(std::move(lower));
    LeastSquares squares;
    squares.residuals = [&](const std::vector<double>& x) {
        std::vector<double> rest = problem.log_errors(x);
        for (std::size_t i = 0; i < rest.size(); ++i) rest[i] -= expected[i];
        return covariance.whitened(std::move(rest));
    };
    squares.weight.assign(at.size(), 1.0);
    squares.spread = problem.error;
    squares.huber = doubted;
    const std::vector<double> start(problem.error.size(), 0.0);
    // Coefficients move by their errors, in which what they do is linear.
    const Jacobian jacobian = differences(squares, start, squares.residuals(start));
    return solve(squares, start, &jacobian);
}

Anchoring anchor(const std::string& name, const std::vector<MeasuredPlan>& runs, const std::string& source) {
    if (runs.empty()) refuse("--anchor: no run can be predicted");
    const machine::Coefficients before = machine::load_coefficients();
    const stack::Stack stack = stack::load_stack(name, *runs.front().plan.hardware);
    const published::Neighbours neighbours = known_neighbours(stack);
    const std::vector<std::string> names = movable(before);
    AnchorProblem problem;
    for (const std::string& coefficient : names) problem.error.push_back(before.at(coefficient).error);
    for (const MeasuredPlan& run : runs) problem.workloads.push_back(published::workload_of(run.plan, stack));
    problem.log_errors = [&](const std::vector<double>& x) {
        const std::vector<search::Estimate> estimates = priced(runs, name, moved(before, names, x));
        std::vector<double> errors;
        for (std::size_t i = 0; i < runs.size(); ++i)
            errors.push_back(std::log(estimates[i].tflops_per_gpu / runs[i].tflops_per_gpu));
        return errors;
    };
    const Solution solution = anchored(problem, neighbours);

    Anchoring result;
    result.stack.base = name;
    result.stack.source = source;
    for (std::size_t j = 0; j < names.size(); ++j) {
        const machine::Coefficient& c = before.at(names[j]);
        const double after = c.value * std::exp(solution.x[j]);
        result.coefficients.push_back({names[j], c.unit, c.value, after, c.error, solution.error[j]});
        if (std::abs(solution.x[j]) > 1e-4) result.stack.coefficients[names[j]] = after;
    }
    std::stable_sort(result.coefficients.begin(), result.coefficients.end(), [](const auto& a, const auto& b) {
        const auto share = [](const Anchoring::Moved& m) {
            return std::abs(std::log(m.after / m.before)) / m.error_before;
        };
        return share(a) > share(b);
    });
    const std::vector<search::Estimate> first = priced(runs, name, before);
    const std::vector<search::Estimate> last = priced(runs, name, moved(before, names, solution.x));
    const std::vector<double> errors = problem.log_errors(solution.x);
    for (std::size_t i = 0; i < runs.size(); ++i)
        result.stack.runs.push_back(
            {runs[i].run_id, problem.workloads[i], errors[i], neighbours.model().noise.at("A")});
    const published::Neighbours joined = neighbours.with(result.stack.runs);
    for (std::size_t i = 0; i < runs.size(); ++i) {
        const MeasuredPlan& run = runs[i];
        const published::Correction known = neighbours.of(problem.workloads[i]), now = joined.of(problem.workloads[i]);
        const search::Estimate old = published::corrected(first[i], known);
        const search::Estimate anew = published::corrected(last[i], now);
        result.runs.push_back({run.run_id, run.tflops_per_gpu, old.tflops_per_gpu, anew.tflops_per_gpu,
                               *published::interval_of(run.plan, old, false, &known).interval,
                               *published::interval_of(run.plan, anew, false, &now).interval});
    }
    return result;
}

} // namespace moe::tools
