// Chooses rows and weights once, so that every refit of a cross-validation is the same problem with fewer rows.
#include "tools/fit/problem.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/pricing/fast_estimator.hpp"

#include <algorithm>
#include <cmath>
#include <memory>

namespace moe::tools {
namespace {

bool alike(const published::Prediction& a, const published::Prediction& b) {
    return a.stack == b.stack && a.model == b.model && a.system == b.system && a.precision == b.precision;
}

} // namespace

FitProblem::FitProblem(const std::vector<std::string>& only, const std::map<std::string, double>& fixed)
    : base_(machine::load_coefficients()) {
    for (const auto& [name, value] : fixed) base_.at(name).value = value;
    for (const std::string& name : only)
        if (base_.count(name) == 0 || base_.at(name).spread <= 0.0)
            refuse("'{}': no coefficient with a spread in profiles/coefficients.json", name);
    for (const auto& [name, c] : base_)
        if (c.spread > 0.0 && fixed.count(name) == 0 &&
            (only.empty() || std::find(only.begin(), only.end(), name) != only.end()))
            names_.push_back(name);
    const std::vector<published::Run> all = published::load_runs(profiles_folder() + "/runs");
    const std::vector<published::Prediction> predictions = published::predict_runs(all, base_, {});
    for (std::size_t i = 0; i < all.size(); ++i) {
        if (!predictions[i].skipped.empty()) continue;
        runs_.push_back(all[i]);
        rows_.push_back(predictions[i]);
    }
    if (rows_.empty()) refuse("profiles/runs: no row can be predicted, nothing to fit");
}

std::vector<double> FitProblem::stored() const {
    std::vector<double> x;
    for (const std::string& name : names_) x.push_back(std::log(base_.at(name).value / base_.at(name).prior));
    return x;
}

machine::Coefficients FitProblem::coefficients(const std::vector<double>& x) const {
    machine::Coefficients c = base_;
    for (std::size_t j = 0; j < names_.size(); ++j) c[names_[j]].value = c[names_[j]].prior * std::exp(x[j]);
    return c;
}

std::vector<published::Prediction> FitProblem::predict(const std::vector<double>& x) const { return predict(x, runs_); }

std::vector<published::Prediction> FitProblem::predict(const std::vector<double>& x,
                                                       const std::string published::Prediction::*field,
                                                       const std::string& value) const {
    std::vector<published::Run> runs;
    for (std::size_t i = 0; i < rows_.size(); ++i)
        if (rows_[i].*field == value) runs.push_back(runs_[i]);
    return predict(x, runs);
}

std::vector<published::Prediction> FitProblem::predict(const std::vector<double>& x,
                                                       const std::vector<published::Run>& runs) const {
    std::vector<published::Prediction> predictions = published::predict_runs(runs, coefficients(x), {});
    for (const published::Prediction& p : predictions)
        if (!p.skipped.empty())
            fail("{}: predicted with some coefficients but not with others: {}", p.run_id, p.skipped);
    return predictions;
}

// A stack that names a coefficient cannot be read without it.
const std::set<std::string>& FitProblem::named_by(const published::Prediction& row) const {
    const std::lock_guard lock(mutex_);
    const auto [entry, fresh] = named_.try_emplace({row.stack, row.plan.hardware->name});
    if (!fresh) return entry->second;
    for (const std::string& name : names_) {
        machine::Coefficients rest = base_;
        rest.erase(name);
        try {
            stack::load_stack(row.stack, *row.plan.hardware, rest);
        } catch (const Error&) {
            entry->second.insert(name);
        }
    }
    return entry->second;
}

std::vector<double> FitProblem::errors(const std::vector<double>& x, const std::string* along,
                                       const std::vector<double>& known) const {
    const machine::Coefficients values = coefficients(x);
    std::map<StackOn, std::unique_ptr<pricing::FastEstimator>> estimators;
    std::vector<double> result = known;
    result.resize(rows_.size());
    for (std::size_t i = 0; i < rows_.size(); ++i) {
        const published::Prediction& row = rows_[i];
        const StackOn key{row.stack, row.plan.hardware->name};
        if (along != nullptr && named_by(row).count(*along) == 0) continue;
        auto& estimator = estimators[key];
        if (!estimator)
            estimator = std::make_unique<pricing::FastEstimator>(
                row.plan.hardware, stack::load_stack(row.stack, *row.plan.hardware, values));
        result[i] =
            std::log1p(row.error) + std::log(row.estimate.step_seconds / estimator->estimate(row.plan).step_seconds);
    }
    return result;
}

double tier_weight(const std::string& tier) { return tier == "A" ? 1.0 : tier == "B" ? 0.7 : 0.1; }

// n rows that differ in nothing but job size or release patch carry the information of about sqrt(n) of them.
double FitProblem::weight(const published::Prediction& row) const {
    const auto group =
        std::count_if(rows_.begin(), rows_.end(), [&](const published::Prediction& r) { return alike(r, row); });
    return tier_weight(row.tier) / (row_noise * row_noise) / std::sqrt(static_cast<double>(group));
}

LeastSquares FitProblem::squares(const std::string published::Prediction::*field, const std::string& value) const {
    LeastSquares problem;
    problem.residuals = [this](const std::vector<double>& x) { return errors(x, nullptr, {}); };
    problem.residuals_along = [this](const std::vector<double>& x, std::size_t j, const std::vector<double>& known) {
        return errors(x, &names_[j], known);
    };
    for (const published::Prediction& row : rows_)
        problem.weight.push_back(!value.empty() && row.*field == value ? 0.0 : weight(row));
    for (const std::string& name : names_) problem.spread.push_back(base_.at(name).spread);
    return problem;
}

std::vector<std::string> FitProblem::values(const std::string published::Prediction::*field) const {
    std::set<std::string> distinct;
    for (const published::Prediction& row : rows_) distinct.insert(row.*field);
    return {distinct.begin(), distinct.end()};
}

std::vector<double> log_errors(const std::vector<published::Prediction>& predictions) {
    std::vector<double> errors;
    for (const published::Prediction& p : predictions) errors.push_back(std::log1p(p.error));
    return errors;
}

} // namespace moe::tools
