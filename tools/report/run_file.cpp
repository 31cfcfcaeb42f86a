// Reads run.json field by field, and routing.csv.
#include "tools/report/run_file.hpp"

#include "planner/base/files.hpp"
#include "planner/base/schema.hpp"
#include "simulator/routing/routing.hpp"

#include <filesystem>
#include <limits>

namespace moe::tools {

namespace {

constexpr double largest = std::numeric_limits<double>::max(), none = std::numeric_limits<double>::quiet_NaN();
constexpr std::int64_t most_steps = std::int64_t{1} << 40;

double figure_of(const JsonObject& json, const char* key) { return json.number_or(key, none, -largest, largest); }

StepRecord step_of(const JsonObject& json) {
    StepRecord step;
    step.step = json.integer("step", 1, most_steps);
    step.loss = figure_of(json, "loss");
    step.grad_norm = figure_of(json, "grad_norm");
    step.lr = figure_of(json, "lr");
    step.seconds = figure_of(json, "seconds");
    step.tokens = json.integer("tokens", 0, std::numeric_limits<std::int64_t>::max());
    step.skipped = json.boolean_or("skipped", false);
    if (json.has("routers"))
        for (const JsonObject& router : json.objects("routers"))
            step.routers.push_back({static_cast<int>(router.integer("layer", 0, 1 << 20)), 0.0, 0.0,
                                    figure_of(router, "load_max_over_mean"), figure_of(router, "load_entropy")});
    return step;
}

} // namespace

RunRecord read_run(const std::string& path) {
    const JsonObject json = JsonObject::parse(read_file(path, long_json.bytes), path, long_json);
    check_schema(json, schema::execute);
    RunRecord run;
    for (const JsonObject& step : json.objects("steps")) run.steps.push_back(step_of(step));
    if (json.has("evaluations"))
        for (const JsonObject& e : json.objects("evaluations"))
            run.evaluations.push_back({e.integer("step", 0, most_steps), figure_of(e, "loss"),
                                       e.integer("tokens", 0, std::numeric_limits<std::int64_t>::max())});
    run.backend = json.string("backend");
    run.ranks = static_cast<int>(json.integer("ranks", 1, 1 << 24));
    run.peak_memory_gib = json.number("peak_memory_gib", 0.0, largest);
    run.unigram_entropy = json.number("unigram_entropy", 0.0, largest);
    run.predicted_step_seconds = json.number("predicted_step_seconds", 0.0, largest);
    run.measured_step_seconds = json.number("measured_step_seconds", 0.0, largest);
    run.command = json.string_or("command", "");
    return run;
}

std::vector<std::vector<double>> read_routed(const std::string& path) {
    std::error_code error;
    if (!std::filesystem::exists(path, error)) return {};
    return routing::load_histogram(path);
}

} // namespace moe::tools
