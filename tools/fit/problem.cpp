// Chooses rows and weights once, so that every refit of a cross-validation is the same problem with fewer rows.
#include "tools/fit/problem.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"

#include <algorithm>
#include <cmath>
#include <set>

namespace moe::tools {
namespace {

bool alike(const published::Prediction& a, const published::Prediction& b) {
    return a.stack == b.stack && a.model == b.model && a.system == b.system && a.precision == b.precision;
}

} // namespace

FitProblem::FitProblem(const std::vector<std::string>& only) : base_(machine::load_coefficients()) {
    for (const std::string& name : only)
        if (base_.count(name) == 0 || base_.at(name).spread <= 0.0)
            refuse("'{}': no coefficient with a spread in profiles/coefficients.json", name);
    for (const auto& [name, c] : base_)
        if (c.spread > 0.0 && (only.empty() || std::find(only.begin(), only.end(), name) != only.end()))
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

std::vector<published::Prediction> FitProblem::predict(const std::vector<double>& x) const {
    std::vector<published::Prediction> predictions = published::predict_runs(runs_, coefficients(x), {});
    for (const published::Prediction& p : predictions)
        if (!p.skipped.empty())
            fail("{}: predicted with some coefficients but not with others: {}", p.run_id, p.skipped);
    return predictions;
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
    problem.residuals = [this](const std::vector<double>& x) { return log_errors(predict(x)); };
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
