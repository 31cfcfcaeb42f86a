// Takes each group out of the fit and out of the neighbours, and shows its rows one by one.
#include "tools/fit/anchor_table.hpp"

#include "planner/base/error.hpp"
#include "tools/calibrate/anchors.hpp"

#include <Eigen/Dense>

#include <algorithm>
#include <cmath>
#include <map>

namespace moe::tools {
namespace {

struct Linear { // log errors of all rows around the stored coefficients
    std::vector<double> errors;
    Eigen::MatrixXd jacobian;   // by row and parameter
    Eigen::MatrixXd curvature;  // of the rows' weighted squares and the priors
    std::vector<double> weight; // of rows, robust
};

Linear linear(const FitProblem& problem) {
    const LeastSquares squares = problem.squares(&published::Prediction::family, "");
    Linear l;
    const std::vector<double> x = problem.stored();
    l.errors = squares.residuals(x);
    const Jacobian rows = differences(squares, x, l.errors);
    const auto n = static_cast<Eigen::Index>(rows.size()), k = static_cast<Eigen::Index>(x.size());
    l.jacobian.resize(n, k);
    l.curvature = Eigen::MatrixXd::Zero(k, k);
    for (Eigen::Index i = 0; i < n; ++i) {
        const auto row = static_cast<std::size_t>(i);
        l.jacobian.row(i) = Eigen::Map<const Eigen::RowVectorXd>(rows[row].data(), k);
        l.weight.push_back(squares.weight[row] *
                           std::min(1.0, squares.huber / std::max(std::abs(l.errors[row]), 1e-12)));
        l.curvature += l.weight.back() * l.jacobian.row(i).transpose() * l.jacobian.row(i);
    }
    for (Eigen::Index j = 0; j < k; ++j)
        l.curvature(j, j) += 1.0 / std::pow(squares.spread[static_cast<std::size_t>(j)], 2);
    return l;
}

// The fit without some rows: where its coefficients lie, and their standard errors.
struct Without {
    Eigen::VectorXd x;
    std::vector<double> error;
};
Without without(const Linear& l, const std::vector<std::size_t>& rows) {
    Eigen::MatrixXd curvature = l.curvature;
    Eigen::VectorXd gradient = Eigen::VectorXd::Zero(curvature.rows());
    for (const std::size_t row : rows) {
        const Eigen::VectorXd derivative = l.jacobian.row(static_cast<Eigen::Index>(row)).transpose();
        curvature -= l.weight[row] * derivative * derivative.transpose();
        gradient += l.weight[row] * l.errors[row] * derivative;
    }
    const Eigen::MatrixXd covariance = curvature.inverse();
    Without result{covariance * gradient, {}};
    for (Eigen::Index j = 0; j < covariance.rows(); ++j) result.error.push_back(std::sqrt(covariance(j, j)));
    return result;
}

double off(double log_error) { return std::abs(std::expm1(log_error)); }

AnchoredGroup anchored_group(const std::vector<published::Prediction>& rows, const Linear& l,
                             const published::NeighbourModel& model, const std::vector<std::size_t>& members) {
    const Without fit = without(l, members);
    const Eigen::VectorXd moved = l.jacobian * fit.x;
    std::vector<stack::MeasuredRun> others;
    for (std::size_t i = 0; i < rows.size(); ++i)
        if (std::find(members.begin(), members.end(), i) == members.end())
            others.push_back({rows[i].run_id, rows[i].workload, l.errors[i] + moved(static_cast<Eigen::Index>(i)),
                              model.noise.at(rows[i].tier)});
    const published::Neighbours known(model, std::move(others));
    const auto error_at = [&](std::size_t row, const std::vector<double>& x) {
        const auto at = static_cast<Eigen::Index>(row);
        return l.errors[row] + moved(at) +
               l.jacobian.row(at).dot(Eigen::Map<const Eigen::VectorXd>(x.data(), static_cast<Eigen::Index>(x.size())));
    };
    const std::vector<double> unmoved(fit.error.size(), 0.0);
    AnchoredGroup group;
    group.model = rows[members.front()].model;
    group.system = rows[members.front()].system;
    group.rows = static_cast<int>(members.size());
    for (const std::size_t anchor : members) {
        const Solution solution =
            anchored({[&](const std::vector<double>& x) { return std::vector<double>{error_at(anchor, x)}; },
                      fit.error,
                      {rows[anchor].workload}},
                     known);
        const published::Neighbours joined = known.with(
            {{rows[anchor].run_id, rows[anchor].workload, error_at(anchor, solution.x), model.noise.at("A")}});
        for (const std::size_t row : members) {
            if (row == anchor) continue;
            const double before = off(error_at(row, unmoved) - known.of(rows[row].workload).log_error);
            const double after = off(error_at(row, solution.x) - joined.of(rows[row].workload).log_error);
            group.before += before;
            group.after += after;
            if (rows[row].workload.stack != rows[anchor].workload.stack) continue;
            ++group.pairs;
            group.same_before += before;
            group.same_after += after;
        }
    }
    const double pairs = static_cast<double>(group.rows) * (group.rows - 1);
    group.before /= pairs, group.after /= pairs;
    if (group.pairs > 0) group.same_before /= group.pairs, group.same_after /= group.pairs;
    return group;
}

} // namespace

std::vector<AnchoredGroup> anchored_groups(const FitProblem& problem, const published::NeighbourModel& model) {
    const std::vector<published::Prediction>& rows = problem.rows();
    std::map<std::pair<std::string, std::string>, std::vector<std::size_t>> groups;
    for (std::size_t i = 0; i < rows.size(); ++i)
        if (rows[i].tier != "C") groups[{rows[i].model, rows[i].system}].push_back(i);
    std::erase_if(groups, [](const auto& group) { return group.second.size() < 3; });
    const Linear l = linear(problem);
    std::vector<const std::vector<std::size_t>*> members;
    for (const auto& [name, group] : groups) members.push_back(&group);
    std::vector<AnchoredGroup> result(members.size());
    in_parallel(members.size(), [&](std::size_t i) { result[i] = anchored_group(rows, l, model, *members[i]); });
    return result;
}

std::string anchored_table(const std::vector<AnchoredGroup>& groups) {
    std::string text =
        "| model | system | rows | without | anchored on one | pairs of one stack | without | anchored |\n"
        "|---|---|---|---|---|---|---|---|\n";
    const auto percent = [](double error) { return fmt::format("{:.1f} %", 100.0 * error); };
    double before = 0.0, after = 0.0, same_before = 0.0, same_after = 0.0;
    int same = 0;
    for (const AnchoredGroup& g : groups) {
        text += fmt::format("| {} | {} | {} | {} | {} | {} | {} | {} |\n", g.model, g.system, g.rows, percent(g.before),
                            percent(g.after), g.pairs, g.pairs > 0 ? percent(g.same_before) : "-",
                            g.pairs > 0 ? percent(g.same_after) : "-");
        before += g.before, after += g.after;
        if (g.pairs == 0) continue;
        ++same;
        same_before += g.same_before, same_after += g.same_after;
    }
    const double count = std::max<double>(1.0, static_cast<double>(groups.size()));
    return text + fmt::format("| mean of groups | | | {} | {} | | {} | {} |\n", percent(before / count),
                              percent(after / count), percent(same_before / std::max(1, same)),
                              percent(same_after / std::max(1, same)));
}

} // namespace moe::tools
