// The fit of the stacks' coefficients to published runs: which rows count how much, and what is left out in turn.
#pragma once

#include "planner/machine/coefficients.hpp"
#include "simulator/published/validate.hpp"
#include "tools/calibrate/least_squares.hpp"

#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace moe::tools {

// Rows that have a prediction, and the coefficients with a spread as parameters: x = log(value / prior).
class FitProblem {
public:
    // All runs of profiles/runs with the coefficients of profiles/coefficients.json; of these `only` are parameters, or
    // all where it is empty, but never those that `fixed` gives a value. Throws Error (bad_input).
    explicit FitProblem(const std::vector<std::string>& only = {}, const std::map<std::string, double>& fixed = {});

    const std::vector<published::Prediction>& rows() const {
        return rows_;
    } // as predicted with the stored coefficients
    const std::vector<std::string>& names() const { return names_; }
    std::vector<double> stored() const;
    machine::Coefficients coefficients(const std::vector<double>& x) const;
    std::vector<published::Prediction> predict(const std::vector<double>& x) const;
    // As predict(), of the rows alone for which `field` holds `value`, in their order.
    std::vector<published::Prediction> predict(const std::vector<double>& x,
                                               const std::string published::Prediction::*field,
                                               const std::string& value) const;
    // What rows leave open is chosen anew with x.
    void choose(const std::vector<double>& x) { rows_ = predict(x); }
    // The squares price the plans that rows() have chosen, and where one parameter moves only those that depend on it.
    // Rows for which `field` holds `value` are left out; an empty value leaves out none.
    LeastSquares squares(const std::string published::Prediction::*field, const std::string& value) const;
    // The distinct values of a field, sorted.
    std::vector<std::string> values(const std::string published::Prediction::*field) const;

private:
    double weight(const published::Prediction& row) const;
    std::vector<published::Prediction> predict(const std::vector<double>& x,
                                               const std::vector<published::Run>& runs) const;
    // log(predicted / published) of the chosen plans; of stacks that do not name a coefficient, if one is given, as in
    // `known`.
    std::vector<double> errors(const std::vector<double>& x, const std::string* along,
                               const std::vector<double>& known) const;

    using StackOn = std::pair<std::string, std::string>; // names of a stack and of its hardware

    std::vector<published::Run> runs_;
    std::vector<published::Prediction> rows_;
    machine::Coefficients base_;
    std::vector<std::string> names_;
    const std::set<std::string>& named_by(const published::Prediction& row) const;

    // Parameters that a stack names, found when they are asked for.
    mutable std::map<StackOn, std::set<std::string>> named_;
    mutable std::mutex mutex_;
};

// Standard deviation of log(predicted / published) that a row of tier A would have if model and recipe were right:
// release to release figures differ by 1.5 % (median) and 6 % (one in ten), the rest is what a handful of coefficients
// cannot describe.
inline constexpr double row_noise = 0.05;
// How much a row counts. Tier B leaves settings open and tier C is doubtful: they count less.
double tier_weight(const std::string& tier);

// log(predicted / published) of every row.
std::vector<double> log_errors(const std::vector<published::Prediction>& predictions);

} // namespace moe::tools
