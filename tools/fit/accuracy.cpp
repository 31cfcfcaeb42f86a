// Writes tables whose every figure comes from the rows that it is handed.
#include "tools/fit/accuracy.hpp"

#include "planner/base/error.hpp"
#include "planner/base/json.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <map>

namespace moe::tools {
namespace {

constexpr const char* heading =
    "# How far predictions of published runs are off\n"
    "\n"
    "`build/tools/fit/fit-stacks` writes this file; with `--tables` it does so without a new fit.\n"
    "[README.md](README.md) says what the columns mean, and\n"
    "[docs/notes/published-runs.md](../../docs/notes/published-runs.md) why single rows are missed.\n";

using Rows = std::vector<published::Prediction>;

Rows only(const Rows& rows, const std::string published::Prediction::*field, const std::string& value) {
    Rows kept;
    std::copy_if(rows.begin(), rows.end(), std::back_inserter(kept),
                 [&](const published::Prediction& p) { return p.*field == value; });
    return kept;
}

Rows tiers_a_b(const Rows& rows) {
    Rows kept;
    std::copy_if(rows.begin(), rows.end(), std::back_inserter(kept),
                 [](const published::Prediction& p) { return p.tier != "C"; });
    return kept;
}

std::string cells(const Rows& rows) {
    const published::ValidationSummary s = published::summarize(rows);
    return fmt::format("{:.1f} % | {:+.1f} % | {:.0f} % | {}", 100.0 * s.mape, 100.0 * s.bias,
                       100.0 * s.within_10_percent, s.pairs > 0 ? fmt::format("{:.2f}", s.kendall_tau) : "-");
}

std::string line(const std::string& name, const Rows& fitted, const Rows& family, const Rows& system,
                 const Rows& release) {
    std::string text = fmt::format("| {} | {} | {} |", name, fitted.size(), cells(fitted));
    for (const Rows* left : {&family, &system, &release})
        text += fmt::format(" {:.1f} % |", 100.0 * published::summarize(*left).mape);
    return text + "\n";
}

std::string classes(const CrossValidation& rows) {
    std::string text =
        "| rows | | MAPE | bias | within 10 % | Kendall tau | MAPE, family left out | MAPE, system left out | "
        "MAPE, system and stack left out |\n"
        "|---|---|---|---|---|---|---|---|---|\n";
    for (const char* name : {"A MoE", "A dense", "B MoE", "B dense", "C MoE", "C dense", "A hybrid", "B hybrid"})
        text += line(name, only(rows.fitted, &published::Prediction::tier_and_kind, name),
                     only(rows.left_family, &published::Prediction::tier_and_kind, name),
                     only(rows.left_system, &published::Prediction::tier_and_kind, name),
                     only(rows.left_release, &published::Prediction::tier_and_kind, name));
    text += line("A and B together", tiers_a_b(rows.fitted), tiers_a_b(rows.left_family), tiers_a_b(rows.left_system),
                 tiers_a_b(rows.left_release));
    return text + line("all", rows.fitted, rows.left_family, rows.left_system, rows.left_release);
}

std::string groups(const CrossValidation& rows, const std::string published::Prediction::*field, const Rows& left,
                   const char* what) {
    std::string text =
        fmt::format("| {} | rows of A and B | MAPE | bias | MAPE, itself left out | bias, itself left out |\n"
                    "|---|---|---|---|---|---|\n",
                    what);
    for (const auto& [name, unused] : published::summarize_by(rows.fitted, field)) {
        const Rows fitted = tiers_a_b(only(rows.fitted, field, name)), out = tiers_a_b(only(left, field, name));
        if (fitted.empty()) continue;
        const published::ValidationSummary a = published::summarize(fitted), b = published::summarize(out);
        text += fmt::format("| {} | {} | {:.1f} % | {:+.1f} % | {:.1f} % | {:+.1f} % |\n", name, a.predicted,
                            100.0 * a.mape, 100.0 * a.bias, 100.0 * b.mape, 100.0 * b.bias);
    }
    return text;
}

std::string coefficient_table(const machine::Coefficients& coefficients) {
    std::string text = "| coefficient | prior | value | standard error | unit |\n|---|---|---|---|---|\n";
    for (const auto& [name, c] : coefficients)
        text += fmt::format("| {} | {:.3g}{} | {:.3g} | {} | {} |\n", name, c.prior,
                            c.spread > 0.0 ? fmt::format(" (x/: {:.2f})", std::exp(c.spread)) : ", kept", c.value,
                            c.error > 0.0 ? fmt::format("{:.0f} %", 100.0 * c.error) : "-", c.unit);
    return text;
}

std::string misses(const Rows& fitted) {
    Rows wide = tiers_a_b(fitted);
    wide.erase(std::remove_if(wide.begin(), wide.end(),
                              [](const published::Prediction& p) { return std::abs(p.error) <= 0.15; }),
               wide.end());
    std::stable_sort(wide.begin(), wide.end(), [](const published::Prediction& a, const published::Prediction& b) {
        return std::abs(std::log1p(a.error)) > std::abs(std::log1p(b.error));
    });
    std::string text = "| row | tier | published | predicted | error |\n|---|---|---|---|---|\n";
    for (const published::Prediction& p : wide)
        text += fmt::format("| {} | {} | {:.0f} | {:.0f} | {:+.0f} % |\n", p.run_id, p.tier, p.published, p.predicted,
                            100.0 * p.error);
    return text;
}

} // namespace

namespace {

std::map<std::string, nlohmann::json> by_run(const std::string& residuals) {
    std::map<std::string, nlohmann::json> stored;
    for (const nlohmann::json& row : parse_json<nlohmann::json>(residuals, "residuals.json"))
        stored[row.at("run_id")] = row;
    return stored;
}

// Rounded as residuals.json is.
void set_error(published::Prediction& p, double log_error) {
    p.error = std::expm1(std::round(log_error * 1e4) / 1e4);
    p.predicted = p.published * (1.0 + p.error);
}

void set_left_out(CrossValidation& rows, std::size_t i, const nlohmann::json& stored) {
    set_error(rows.left_family[i], stored.at("log_residual").get<double>());
    set_error(rows.left_system[i], stored.at("system_left_out").get<double>());
    set_error(rows.left_release[i], stored.at("release_left_out").get<double>());
}

} // namespace

CrossValidation stored_rows(const Rows& predictions, const std::string& residuals, const std::string& place) {
    const std::map<std::string, nlohmann::json> stored = by_run(residuals);
    CrossValidation rows{predictions, predictions, predictions, predictions};
    for (std::size_t i = 0; i < predictions.size(); ++i) {
        const auto found = stored.find(predictions[i].run_id);
        if (found == stored.end()) refuse("{}: has no row {}: run fit-stacks", place, predictions[i].run_id);
        set_error(rows.fitted[i], std::log1p(predictions[i].error));
        set_left_out(rows, i, found->second);
    }
    return rows;
}

void keep_stored(CrossValidation& rows, const std::string& residuals) {
    const std::map<std::string, nlohmann::json> stored = by_run(residuals);
    for (std::size_t i = 0; i < rows.fitted.size(); ++i)
        if (const auto found = stored.find(rows.fitted[i].run_id); found != stored.end())
            set_left_out(rows, i, found->second);
}

std::string residuals_json(const CrossValidation& rows) {
    nlohmann::ordered_json list = nlohmann::ordered_json::array();
    const auto rounded = [](double error) { return std::round(std::log1p(error) * 1e4) / 1e4; };
    for (std::size_t i = 0; i < rows.fitted.size(); ++i) {
        const published::Prediction& p = rows.fitted[i];
        const stack::Workload& w = p.workload;
        list.push_back({{"run_id", p.run_id},
                        {"family", p.family},
                        {"system", p.system},
                        {"kind", p.kind},
                        {"tier", p.tier},
                        {"model", w.model},
                        {"hardware", w.hardware},
                        {"generation", w.generation},
                        {"precision", w.precision},
                        {"stack", w.stack},
                        {"software", w.software},
                        {"gpus", static_cast<std::int64_t>(w.gpus)},
                        {"seq", static_cast<std::int64_t>(w.seq)},
                        {"log_residual", rounded(rows.left_family[i].error)},
                        {"system_left_out", rounded(rows.left_system[i].error)},
                        {"release_left_out", rounded(rows.left_release[i].error)},
                        {"fitted", rounded(p.error)}});
    }
    std::string text = "[\n";
    for (std::size_t i = 0; i < list.size(); ++i)
        text += fmt::format(" {}{}\n", list[i].dump(), i + 1 < list.size() ? "," : "");
    text += "]\n";
    return text;
}

std::string accuracy_document(const CrossValidation& rows, const machine::Coefficients& coefficients) {
    return fmt::format("{}\n"
                       "## By tier and kind of model\n\n{}\n"
                       "## By system\n\n{}\n"
                       "## By model family\n\n{}\n"
                       "## Coefficients\n\n{}\n"
                       "## Rows of tiers A and B that are missed by more than 15 %\n\n{}",
                       heading, classes(rows), groups(rows, &published::Prediction::system, rows.left_system, "system"),
                       groups(rows, &published::Prediction::family, rows.left_family, "family"),
                       coefficient_table(coefficients), misses(rows.fitted));
}

} // namespace moe::tools
