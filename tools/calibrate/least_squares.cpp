// Gauss-Newton steps on reweighted rows.
#include "tools/calibrate/least_squares.hpp"

#include <Eigen/Dense>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <mutex>
#include <thread>

namespace moe::tools {
namespace {

constexpr double step = 0.02; // of a parameter, for differences; parameters are logarithms

double objective(const LeastSquares& p, const std::vector<double>& x, const std::vector<double>& residuals) {
    double sum = 0.0;
    for (std::size_t i = 0; i < residuals.size(); ++i) {
        const double r = std::abs(residuals[i]);
        sum += p.weight[i] * (r <= p.huber ? r * r : p.huber * (2.0 * r - p.huber));
    }
    for (std::size_t j = 0; j < x.size(); ++j) sum += x[j] * x[j] / (p.spread[j] * p.spread[j]);
    return sum;
}

// Curvature and negative gradient of the reweighted squares.
std::pair<Eigen::MatrixXd, Eigen::VectorXd> normal_equations(const LeastSquares& p, const Jacobian& jacobian,
                                                             const std::vector<double>& x,
                                                             const std::vector<double>& residuals) {
    const auto n = static_cast<Eigen::Index>(x.size());
    Eigen::MatrixXd curvature = Eigen::MatrixXd::Zero(n, n);
    Eigen::VectorXd descent = Eigen::VectorXd::Zero(n);
    for (std::size_t i = 0; i < residuals.size(); ++i) {
        if (p.weight[i] <= 0.0) continue;
        const double weight = p.weight[i] * std::min(1.0, p.huber / std::max(std::abs(residuals[i]), 1e-12));
        const Eigen::Map<const Eigen::VectorXd> row(jacobian[i].data(), n);
        curvature += weight * row * row.transpose();
        descent -= weight * residuals[i] * row;
    }
    for (Eigen::Index j = 0; j < n; ++j) {
        const double prior = 1.0 / std::pow(p.spread[static_cast<std::size_t>(j)], 2);
        curvature(j, j) += prior;
        descent(j) -= prior * x[static_cast<std::size_t>(j)];
    }
    return {curvature, descent};
}

} // namespace

void in_parallel(std::size_t count, const std::function<void(std::size_t)>& work) {
    static thread_local bool inside = false;
    if (inside) {
        for (std::size_t i = 0; i < count; ++i) work(i);
        return;
    }
    std::atomic<std::size_t> next{0};
    std::exception_ptr error;
    std::mutex mutex;
    const auto loop = [&] {
        inside = true;
        for (std::size_t i = next++; i < count; i = next++) {
            try {
                work(i);
            } catch (...) {
                const std::lock_guard lock(mutex);
                error = std::current_exception();
            }
        }
    };
    std::vector<std::thread> helpers;
    for (unsigned t = 1; t < std::max(1U, std::thread::hardware_concurrency()); ++t) helpers.emplace_back(loop);
    loop();
    for (std::thread& helper : helpers) helper.join();
    inside = false;
    if (error) std::rethrow_exception(error);
}

Jacobian differences(const LeastSquares& problem, const std::vector<double>& x, const std::vector<double>& residuals) {
    Jacobian jacobian(residuals.size(), std::vector<double>(x.size(), 0.0));
    in_parallel(x.size(), [&](std::size_t j) {
        std::vector<double> moved = x;
        moved[j] += step;
        const std::vector<double> there =
            problem.residuals_along ? problem.residuals_along(moved, j, residuals) : problem.residuals(moved);
        for (std::size_t i = 0; i < residuals.size(); ++i) jacobian[i][j] = (there[i] - residuals[i]) / step;
    });
    return jacobian;
}

Solution solve(const LeastSquares& problem, std::vector<double> x, const Jacobian* kept) {
    std::vector<double> residuals = problem.residuals(x);
    double now = objective(problem, x, residuals);
    Jacobian jacobian;
    for (int iteration = 0; iteration < problem.iterations; ++iteration) {
        if (kept == nullptr) jacobian = differences(problem, x, residuals);
        const auto [curvature, descent] = normal_equations(problem, kept != nullptr ? *kept : jacobian, x, residuals);
        const Eigen::VectorXd move = curvature.ldlt().solve(descent);
        const double before = now;
        double share = 1.0;
        for (int halvings = 0; halvings < 5; ++halvings, share *= 0.5) {
            std::vector<double> tried = x;
            for (std::size_t j = 0; j < x.size(); ++j) tried[j] += share * move(static_cast<Eigen::Index>(j));
            const std::vector<double> there = problem.residuals(tried);
            const double value = objective(problem, tried, there);
            if (value >= now) continue;
            x = tried;
            residuals = there;
            now = value;
            break;
        }
        if (before - now < 1e-3 * before) break;
    }
    Solution solution{x, residuals, {}, now, {}};
    if (kept == nullptr) solution.jacobian = differences(problem, x, residuals);
    const Eigen::MatrixXd inverse =
        normal_equations(problem, kept != nullptr ? *kept : solution.jacobian, x, residuals).first.inverse();
    for (Eigen::Index j = 0; j < inverse.rows(); ++j) solution.error.push_back(std::sqrt(inverse(j, j)));
    return solution;
}

} // namespace moe::tools
