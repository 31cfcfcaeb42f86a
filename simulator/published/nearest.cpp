// Ranks published runs by how far their workload is from a plan's, then by how far their choices are.
#include "simulator/published/nearest.hpp"

#include "planner/base/files.hpp"
#include "planner/base/json_object.hpp"
#include "planner/machine/coefficients.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan_fields.hpp"
#include "planner/stack/plan_words.hpp"
#include "simulator/published/neighbours.hpp"
#include "simulator/published/ratios.hpp"
#include "simulator/published/run_plan.hpp"
#include "simulator/published/run_recipe.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>

namespace moe::published {
namespace {

// Weights of what differs, in doublings of the GPUs: another model changes more than any number of them.
constexpr double other_model = 4.0, other_machine = 3.0, other_precision = 1.5, field = 0.25;
constexpr std::size_t planned = 24; // nearest by workload whose choices are compared

// Of what the row itself says; infinite for a row that names no precision that is known.
double workload_distance(const plan::Plan& plan, const Run& run) {
    if (!run.gpus || !run.gbs || !run.seq_len) return INFINITY;
    double distance = run.model == plan.model->name ? 0.0 : other_model;
    if (hardware_profile_of(run.system) != stack::plan_word(plan, "hardware")) distance += other_machine;
    if (recipe_precision(run.precision) != plan.precision) distance += other_precision;
    return distance + doublings(static_cast<double>(*run.gpus), plan.gpus) +
           0.5 * doublings(static_cast<double>(*run.gbs), static_cast<double>(plan.gbs)) +
           doublings(static_cast<double>(*run.seq_len), static_cast<double>(plan.seq));
}

// log(predicted / published) of every fitted run.
std::map<std::string, double> fitted_residuals() {
    std::map<std::string, double> fitted;
    const std::string path = profiles_folder() + "/runs/residuals.json";
    if (!std::filesystem::exists(path)) return fitted;
    for (const JsonObject& row : JsonObject::parse_list(read_file(path), path))
        fitted[row.string("run_id")] = row.number("fitted", -20.0, 20.0);
    return fitted;
}

// Without the degrees that follow from others.
std::vector<std::string> differing_fields(const plan::Plan& plan, const plan::Plan& other) {
    std::vector<std::string> fields;
    for (const plan::FieldChange& change : plan::differences(plan, other))
        if (change.field != "dp" && change.field != "edp") fields.push_back(change.field);
    return fields;
}

} // namespace

PublishedRuns::PublishedRuns() {
    const std::map<std::string, double> fitted = fitted_residuals();
    const std::string folder = profiles_folder() + "/runs";
    if (fitted.empty() || !std::filesystem::is_directory(folder)) return;
    for (Run& run : load_runs(folder))
        if (const auto found = fitted.find(run.run_id); found != fitted.end())
            runs_.push_back({std::move(run), found->second, std::nullopt});
    planner_.emplace(machine::load_coefficients());
}

std::vector<NearRun> PublishedRuns::nearest(const plan::Plan& plan, std::size_t most) {
    std::vector<std::pair<double, Known*>> runs;
    for (Known& known : runs_) runs.emplace_back(workload_distance(plan, known.run), &known);
    const auto nearer = [](const auto& a, const auto& b) { return a.first < b.first; };
    std::stable_sort(runs.begin(), runs.end(), nearer);
    runs.resize(std::min(runs.size(), planned));
    struct Near {
        plan::Plan plan;
        NearRun run;
    };
    std::vector<std::pair<double, Near>> near;
    for (const auto& [distance, known] : runs) {
        const Run& run = known->run;
        if (!known->planned) known->planned = planner_->plan(run);
        const PlannedRun& row = *known->planned;
        if (!row.skipped.empty() || row.kind != kind_of(*plan.model)) continue;
        const double measured = run.tflops_std ? *run.tflops_std : run.tflops_per_gpu.value_or(0.0);
        near.emplace_back(
            distance + field * differing_choices(plan, row.plan),
            Near{row.plan,
                 {run.run_id, measured, measured * std::exp(known->fitted), differing_fields(plan, row.plan)}});
    }
    std::stable_sort(near.begin(), near.end(), nearer);
    // A plan that several releases ran says the same each time: its first row stands for it.
    std::vector<NearRun> result;
    for (std::size_t i = 0; i < near.size() && result.size() < most; ++i) {
        const auto same = [&](const auto& before) {
            const std::vector<plan::FieldChange> changes = plan::differences(before.second.plan, near[i].second.plan);
            return std::all_of(changes.begin(), changes.end(),
                               [](const plan::FieldChange& change) { return change.field == "stack"; });
        };
        const auto begin = near.begin(), here = begin + static_cast<std::ptrdiff_t>(i);
        if (std::none_of(begin, here, same)) result.push_back(near[i].second.run);
    }
    return result;
}

} // namespace moe::published
