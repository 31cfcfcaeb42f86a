// Fits the coefficients of the published stacks to the published runs, and reports how far unseen families and systems
// are off.
#include "planner/coefficients.hpp"
#include "planner/error.hpp"
#include "planner/files.hpp"
#include "simulator/validate.hpp"
#include "tools/fit/least_squares.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

using namespace moe;
using namespace moe::tools;

namespace {

struct Fit {
    std::vector<Run> runs;
    Coefficients base;
    std::vector<std::string> names; // of the coefficients that are fitted

    Coefficients at(const std::vector<double>& x) const {
        Coefficients c = base;
        for (std::size_t j = 0; j < names.size(); ++j) c[names[j]].value = c[names[j]].prior * std::exp(x[j]);
        return c;
    }
    std::vector<double> residuals(const std::vector<double>& x) const {
        std::vector<double> r;
        for (const Prediction& p : predict_runs(runs, at(x), {}))
            r.push_back(p.skipped.empty() ? std::log1p(p.error) : 0.0);
        return r;
    }
};

void print(const char* name, const ValidationSummary& s) {
    fmt::print("{:34} {:4} MAPE {:5.1f} bias {:+5.1f} in10 {:4.0f} tau {:.2f}\n", name, s.predicted, 100 * s.mape,
               100 * s.bias, 100 * s.within_10_percent, s.kendall_tau);
}

void report(const std::vector<Prediction>& predictions) {
    print("all", summarize(predictions));
    for (const auto& [group, field] : validation_groups)
        for (const auto& [value, s] : summarize_by(predictions, field))
            if (s.predicted > 0) print(fmt::format("{} {}", group, value).c_str(), s);
}

} // namespace

int main(int argc, char** argv) {
    const auto has = [&](const char* flag) {
        return std::any_of(argv + 1, argv + argc, [&](const char* a) { return std::strcmp(a, flag) == 0; });
    };
    Fit fit;
    fit.base = load_coefficients();
    for (const auto& [name, c] : fit.base)
        if (c.spread > 0.0) fit.names.push_back(name);
    fit.runs = load_runs(profiles_folder() + "/runs");
    const std::vector<Prediction> first = predict_runs(fit.runs, fit.base, {});
    std::vector<Run> kept;
    std::vector<Prediction> rows;
    for (std::size_t i = 0; i < first.size(); ++i)
        if (first[i].skipped.empty()) kept.push_back(fit.runs[i]), rows.push_back(first[i]);
    fit.runs = kept;
    LeastSquares problem;
    problem.residuals = [&](const std::vector<double>& x) { return fit.residuals(x); };
    std::map<std::string, int> alike;
    const auto key = [&](std::size_t i) { return rows[i].stack + rows[i].model + rows[i].system + rows[i].precision; };
    for (std::size_t i = 0; i < rows.size(); ++i) ++alike[key(i)];
    for (std::size_t i = 0; i < rows.size(); ++i) {
        const double tier = rows[i].tier == "A" ? 1.0 : rows[i].tier == "B" ? 0.7 : 0.1;
        problem.weight.push_back(tier / (0.05 * 0.05) / std::sqrt(alike[key(i)]));
    }
    std::vector<double> x;
    for (const std::string& name : fit.names) {
        problem.spread.push_back(fit.base[name].spread);
        x.push_back(std::log(fit.base[name].value / fit.base[name].prior));
    }
    if (!has("--check")) {
        problem.iterations = 6;
        const Solution s = solve(problem, x, nullptr);
        for (std::size_t j = 0; j < fit.names.size(); ++j) {
            Coefficient& c = fit.base[fit.names[j]];
            c.value = c.prior * std::exp(s.x[j]);
            c.error = s.error[j];
            fmt::print("{:28} prior {:9.4g} spread {:.2f} value {:9.4g} +- {:4.1f} %  ({:+.1f} spreads)\n",
                       fit.names[j], c.prior, c.spread, c.value, 100 * c.error, s.x[j] / c.spread);
        }
        if (has("--write")) save_coefficients(fit.base, profiles_folder() + "/coefficients.json");
    }
    const auto last = predict_runs(fit.runs, fit.base, {});
    report(last);
    if (has("--rows"))
        for (const Prediction& p : last) {
            const Breakdown& b = p.estimate.breakdown;
            const double t = p.estimate.step_seconds / 100.0;
            fmt::print("ROW {:+5.0f}% {} {:60} {:6.0f} cmp{:.0f} tp{:.0f} ep{:.0f} bub{:.0f} dp{:.0f} opt{:.0f} "
                       "rec{:.0f} host{:.0f} {}\n",
                       100 * p.error, p.tier, p.run_id, p.published, b.compute / t, b.tensor / t, b.expert / t,
                       b.bubble / t, b.data / t, b.optimizer / t, b.recompute / t, b.host / t, p.stack);
        }
}
