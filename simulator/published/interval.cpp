// Weighted quantiles of residuals, and the interval that they give around a rate.
#include "simulator/published/interval.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json_object.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/published/run_plan.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <string_view>

namespace moe::published {
namespace {

constexpr const char* measured_system = "cpu";            // rows of machines that were calibrated just before
constexpr std::string_view measured_ending = "-measured"; // of the names of calibrated GPUs

struct Weighted {
    double value, weight;
};

// The smallest value that at least `share` of the weight does not exceed.
double quantile(std::vector<Weighted> rows, double share) {
    std::sort(rows.begin(), rows.end(), [](const Weighted& a, const Weighted& b) { return a.value < b.value; });
    double all = 0.0, sum = 0.0;
    for (const Weighted& row : rows) all += row.weight;
    for (const Weighted& row : rows) {
        sum += row.weight;
        if (sum >= share * all) return row.value;
    }
    return rows.back().value;
}

constexpr double tail = (1.0 - interval_coverage) / 2.0;
// Groups that were never seen have wider tails: among a handful of groups the next one lies outside more often than a
// row among many.
constexpr double new_tail = tail / 4.0;

void widen(ResidualRange& range, const std::vector<Weighted>& rows, double tail) {
    range.low = std::min(range.low, quantile(rows, tail));
    range.high = std::max(range.high, quantile(rows, 1.0 - tail));
}

// Every group weighs the same, whatever its number of rows.
std::vector<Weighted> balanced(const std::vector<const Residual*>& rows, const std::string Residual::*group,
                               double Residual::*value) {
    std::map<std::string, int> count;
    for (const Residual* r : rows) ++count[r->*group];
    std::vector<Weighted> result;
    for (const Residual* r : rows) result.push_back({r->*value, 1.0 / count[r->*group]});
    return result;
}

bool among(const std::vector<const Residual*>& rows, const std::string Residual::*field, const std::string& value) {
    return std::any_of(rows.begin(), rows.end(), [&](const Residual* r) { return r->*field == value; });
}

constexpr double largest_residual = 20.0; // of a residual, which is a logarithm

void read_workload(const JsonObject& row, Residual& r) {
    const auto text = [&row](const char* key) { return row.string(key); };
    r.fitted = row.number("fitted", -largest_residual, largest_residual);
    r.release_left_out = row.number("release_left_out", -largest_residual, largest_residual);
    r.workload = {text("model"),
                  r.family,
                  text("hardware"),
                  text("generation"),
                  text("precision"),
                  text("stack"),
                  text("software"),
                  row.number("gpus", 1.0, 1e9),
                  row.number("seq", 1.0, 1e12)};
}

std::vector<const Residual*> of_kind(const std::vector<Residual>& residuals, const std::string& kind) {
    std::vector<const Residual*> rows;
    for (const Residual& r : residuals)
        if (r.kind == kind && r.tier != "C") rows.push_back(&r);
    return rows;
}

// The name of the rows' system whose profile the plan's hardware is, calibrated or not; the profile's own name when
// there is none.
std::string system_of(const machine::Hardware& hardware, const std::vector<const Residual*>& rows) {
    if (hardware.cpu) return measured_system;
    const std::string name = hardware.name.substr(0, hardware.name.rfind(measured_ending));
    for (const Residual* r : rows)
        if (hardware_profile_of(r->system) == name) return r->system;
    return hardware.name;
}

} // namespace

std::vector<Residual> residuals_from_json(const std::string& text, const std::string& place) {
    std::vector<Residual> residuals;
    for (const JsonObject& row : JsonObject::parse_list(text, place)) {
        Residual r;
        r.run_id = row.string("run_id");
        r.family = row.string("family");
        r.system = row.string("system");
        r.kind = row.string("kind");
        r.tier = row.string("tier");
        r.family_left_out = row.number("log_residual", -largest_residual, largest_residual);
        r.system_left_out = row.number("system_left_out", -largest_residual, largest_residual);
        if (row.has("stack")) read_workload(row, r);
        residuals.push_back(std::move(r));
    }
    return residuals;
}

namespace {

// True where the profile holds what its machine was calibrated for: calls of one device, and calls among as many GPUs.
bool calibrated_for(const machine::Hardware& hardware, int gpus) {
    if (hardware.cpu || gpus == 1) return !hardware.measured.empty();
    const std::string among = fmt::format(".x{}", gpus);
    return std::any_of(hardware.measured.begin(), hardware.measured.end(),
                       [&among](const auto& family) { return family.first.ends_with(among); });
}

} // namespace

std::vector<Residual> load_residuals(const plan::Plan& plan, bool executable) {
    if (executable && !calibrated_for(*plan.hardware, plan.gpus)) return {};
    const std::string path = profiles_folder() + (!executable          ? "/runs/residuals.json"
                                                  : plan.hardware->cpu ? "/measured/cpu-residuals.json"
                                                                       : "/measured/gpu-residuals.json");
    if (!std::filesystem::exists(path)) return {};
    return residuals_from_json(read_file(path), path);
}

std::optional<ResidualRange> residual_range(const std::vector<Residual>& residuals, const std::string& kind,
                                            const std::string& family, const std::string& system) {
    const std::vector<const Residual*> rows = of_kind(residuals, kind);
    if (rows.empty()) return std::nullopt;
    const bool one_family =
        std::all_of(rows.begin(), rows.end(), [&](const Residual* r) { return r->family == rows.front()->family; });
    const auto left_out = one_family ? &Residual::system_left_out : &Residual::family_left_out;
    std::vector<Weighted> equal;
    for (const Residual* r : rows) equal.push_back({r->*left_out, 1.0});
    ResidualRange range{INFINITY, -INFINITY, static_cast<int>(rows.size())};
    widen(range, equal, tail);
    if (!among(rows, &Residual::family, family)) widen(range, balanced(rows, &Residual::family, left_out), new_tail);
    if (!among(rows, &Residual::system, system))
        widen(range, balanced(rows, &Residual::system, &Residual::system_left_out), new_tail);
    return range;
}

IntervalResult interval_of(const plan::Plan& plan, const search::Estimate& estimate,
                           const std::vector<Residual>& residuals, bool new_stack) {
    if (residuals.empty())
        return {std::nullopt,
                fmt::format("no measured runs of stack {} on {} to compare with", plan.stack, plan.hardware->name)};
    const std::string kind = kind_of(*plan.model);
    const std::vector<const Residual*> rows = of_kind(residuals, kind);
    const std::string system = system_of(*plan.hardware, rows), &family = plan.model->architecture;
    const std::optional<ResidualRange> range =
        new_stack ? residual_range(residuals, kind, "", "") : residual_range(residuals, kind, family, system);
    if (!range) return {std::nullopt, fmt::format("no measured runs of {} models to compare with", kind)};
    Interval interval;
    interval.low = estimate.tflops_per_gpu * std::exp(-range->high);
    interval.high = estimate.tflops_per_gpu * std::exp(-range->low);
    interval.rows = range->rows;
    interval.new_family = !among(rows, &Residual::family, family);
    interval.new_system = !among(rows, &Residual::system, system);
    interval.new_stack = new_stack;
    return {interval, {}};
}

bool is_new_stack(const plan::Plan& plan) {
    const stack::Stack stack = stack::load_stack(plan.stack, *plan.hardware);
    return !stack.executable && stack.published.empty();
}

} // namespace moe::published
