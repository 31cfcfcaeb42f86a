// Pairs of published runs of one workload, and what the errors of their ratios say of two plans.
#include "simulator/published/ratios.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json_object.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan_fields.hpp"
#include "simulator/published/interval.hpp"
#include "simulator/published/run_plan.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>
#include <tuple>

namespace moe::published {
namespace {

constexpr double largest_log_error = 20.0; // of an error, as a logarithm
constexpr int few_fields = 2;              // differences up to which plans are close
constexpr std::size_t fewest_pairs = 15;   // that a quantile may rest on

auto workload_fields(const Prediction& p) {
    return std::tuple(p.model, p.system, p.plan.precision, p.plan.gpus, p.plan.gbs, p.plan.seq);
}

double quantile(std::vector<double> values, double share) {
    std::sort(values.begin(), values.end());
    const auto at = static_cast<std::size_t>(share * static_cast<double>(values.size()));
    return values[std::min(at, values.size() - 1)];
}

// The errors that speak of two plans of that kind which differ in so many choices. Plans of one or two differences and
// of more are told apart, since errors of the former are half as large; of all kinds where one has too few.
std::vector<double> errors_for(const std::vector<RatioError>& errors, const std::string& kind, int fields) {
    std::vector<double> same_kind, all;
    for (const RatioError& error : errors) {
        if ((error.fields <= few_fields) != (fields <= few_fields)) continue;
        all.push_back(error.log_error);
        if (error.kind == kind) same_kind.push_back(error.log_error);
    }
    return same_kind.size() >= fewest_pairs ? same_kind : all;
}

} // namespace

int differing_choices(const plan::Plan& a, const plan::Plan& b) {
    static const std::set<std::string> others{"model", "hardware", "stack", "gpus",    "gbs",
                                              "seq",   "dp",       "edp",   "schedule"};
    int count = 0;
    for (const plan::FieldChange& change : plan::differences(a, b))
        if (!others.contains(change.field)) ++count;
    // A schedule that splits backwards is a choice of its own.
    if (a.schedule != b.schedule && (plan::splits_backward(a.schedule) || plan::splits_backward(b.schedule))) ++count;
    return count;
}

std::vector<RatioError> ratio_errors(const std::vector<Prediction>& predictions) {
    std::map<decltype(workload_fields(predictions.front())), std::vector<const Prediction*>> groups;
    for (const Prediction& p : predictions)
        if (p.skipped.empty()) groups[workload_fields(p)].push_back(&p);
    std::vector<RatioError> result;
    for (const auto& [workload, rows] : groups)
        for (std::size_t i = 0; i < rows.size(); ++i)
            for (std::size_t j = i + 1; j < rows.size(); ++j) {
                const int fields = differing_choices(rows[i]->plan, rows[j]->plan);
                if (fields == 0) continue;
                result.push_back(
                    {rows[i]->kind, fields, std::abs(std::log1p(rows[i]->error) - std::log1p(rows[j]->error))});
            }
    return result;
}

std::vector<RatioError> ratio_errors_from_json(const std::string& text, const std::string& place) {
    std::vector<RatioError> errors;
    for (const JsonObject& row : JsonObject::parse_list(text, place))
        errors.push_back({row.string("kind"), static_cast<int>(row.integer("fields", 1, 1000)),
                          row.number("log_error", 0.0, largest_log_error)});
    return errors;
}

std::string ratio_errors_json(const std::vector<RatioError>& errors) {
    std::string text = "[\n";
    for (std::size_t i = 0; i < errors.size(); ++i) {
        const nlohmann::ordered_json row{{"kind", errors[i].kind},
                                         {"fields", errors[i].fields},
                                         {"log_error", std::round(errors[i].log_error * 1e4) / 1e4}};
        text += fmt::format(" {}{}\n", row.dump(), i + 1 < errors.size() ? "," : "");
    }
    return text + "]\n";
}

std::vector<RatioError> load_ratio_errors(bool executable) {
    const std::string path = profiles_folder() + "/runs/ratios.json";
    if (executable || !std::filesystem::exists(path)) return {};
    return ratio_errors_from_json(read_file(path), path);
}

std::optional<double> ratio_margin(const std::vector<RatioError>& errors, const plan::Plan& a, const plan::Plan& b) {
    const int fields = differing_choices(a, b);
    if (fields == 0) return 0.0;
    std::vector<double> known = errors_for(errors, kind_of(*a.model), fields);
    if (known.size() < fewest_pairs) return std::nullopt;
    return quantile(std::move(known), interval_coverage);
}

std::optional<double> certainty(const std::vector<RatioError>& errors, const plan::Plan& a, const plan::Plan& b,
                                double log_ratio) {
    const std::vector<double> known = errors_for(errors, kind_of(*a.model), differing_choices(a, b));
    if (known.size() < fewest_pairs) return std::nullopt;
    // Errors go either way alike: of those that are larger than the difference, half turn its sign.
    const auto smaller =
        std::count_if(known.begin(), known.end(), [&](double error) { return error < std::abs(log_ratio); });
    return 0.5 + 0.5 * static_cast<double>(smaller) / static_cast<double>(known.size());
}

} // namespace moe::published
