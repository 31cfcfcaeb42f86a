// Collects what the page of a run shows.
#include "tools/report/run_report.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"
#include "planner/base/schema.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"
#include "tools/page/page.hpp"
#include "tools/report/origin.hpp"
#include "tools/report/pipeline_boxes.hpp"
#include "tools/report/stamp.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>

namespace moe::tools {

namespace {

using Json = nlohmann::ordered_json;

constexpr std::size_t most_points = 2000; // more than a chart has pixels

// Seven digits are more than a chart shows; what is no number is null.
Json figure(double value) { return std::isfinite(value) ? Json(rounded_to(value, 7)) : Json(nullptr); }

// The tokens of the fullest expert over the mean expert's: of the mean layer and of the worst one.
struct Hottest {
    double mean = 0.0, worst = 0.0;
};
Hottest hottest_of(const StepRecord& step) {
    Hottest result;
    for (const RouterRecord& router : step.routers) {
        result.mean += router.load_max_over_mean / static_cast<double>(step.routers.size());
        result.worst = std::max(result.worst, router.load_max_over_mean);
    }
    return result;
}

Json series_json(const std::vector<StepRecord>& steps, std::size_t every) {
    Json series;
    for (const char* name : {"step", "loss", "grad_norm", "lr", "seconds", "hottest_mean", "hottest_worst"})
        series[name] = Json::array();
    for (std::size_t i = 0; i < steps.size(); ++i) {
        if (i % every != 0 && i + 1 != steps.size()) continue;
        const StepRecord& step = steps[i];
        series["step"].push_back(step.step);
        series["loss"].push_back(figure(step.loss));
        series["grad_norm"].push_back(figure(step.grad_norm));
        series["lr"].push_back(figure(step.lr));
        series["seconds"].push_back(figure(step.seconds));
        if (step.routers.empty()) continue;
        const Hottest hottest = hottest_of(step);
        series["hottest_mean"].push_back(figure(hottest.mean));
        series["hottest_worst"].push_back(figure(hottest.worst));
    }
    return series;
}

Json run_json(const RunRecord& run) {
    const std::size_t every = (run.steps.size() + most_points - 1) / most_points;
    double tokens = 0.0;
    Json skipped = Json::array(), evaluations = Json::array();
    for (const StepRecord& step : run.steps) {
        tokens += static_cast<double>(step.tokens);
        if (step.skipped) skipped.push_back(step.step);
    }
    for (const EvaluationRecord& e : run.evaluations)
        evaluations.push_back({{"step", e.step}, {"loss", figure(e.loss)}, {"tokens", e.tokens}});
    return {{"backend", run.backend},
            {"ranks", run.ranks},
            {"command", run.command},
            {"steps", run.steps.size()},
            {"tokens", tokens},
            {"unigram_entropy", figure(run.unigram_entropy)},
            {"peak_memory_gib", run.peak_memory_gib},
            {"predicted_step_seconds", run.predicted_step_seconds},
            {"measured_step_seconds", run.measured_step_seconds},
            {"every", std::max<std::size_t>(every, 1)},
            {"series", series_json(run.steps, std::max<std::size_t>(every, 1))},
            {"skipped", skipped},
            {"evaluations", evaluations}};
}

// Layers as the routers of the last step name them; without these, in their order.
Json experts_json(const std::vector<std::vector<double>>& routed, const RunRecord* run) {
    const std::vector<RouterRecord>* routers =
        run == nullptr || run->steps.empty() ? nullptr : &run->steps.back().routers;
    const bool named = routers != nullptr && routers->size() == routed.size();
    Json layers = Json::array();
    for (std::size_t i = 0; i < routed.size(); ++i)
        layers.push_back({{"layer", named ? (*routers)[i].layer : static_cast<int>(i)}, {"tokens", routed[i]}});
    return layers;
}

// A trace that was written by hand may name stages that its plan does not have.
void check_stages(const program::Timeline& timeline, const plan::Plan& plan) {
    for (const int stage : timeline.pipeline_rank)
        if (stage < 0 || stage >= plan.pp)
            refuse("{} trace: pipeline_rank = {}: its plan has {} stages",
                   timeline.predicted ? "the predicted" : "the measured", stage, plan.pp);
}

struct Drawn {
    std::string title, data;
};

Drawn drawn(const RunReport& report) {
    const std::string& text = report.predicted.plan_json;
    const plan::Plan plan = plan::plan_from_json(text, "the plan of the trace");
    check_stages(report.predicted, plan);
    Json document = origin_json(parse_json<Json>(text, "the plan of the trace"), report.command);
    document["plan"] = parse_json<Json>(text, "the plan of the trace");
    document["choices"] = choices_json(plan);
    if (report.run != nullptr) document["run"] = run_json(*report.run);
    if (!report.routed.empty()) document["experts"] = experts_json(report.routed, report.run);
    document["predicted"] = pipeline_json(report.predicted, plan);
    if (report.measured != nullptr) {
        check_stages(*report.measured, plan);
        document["comparison"] =
            parse_json<Json>(comparison_document(compare(report.predicted, *report.measured)), "comparison");
        document["measured"] = pipeline_json(*report.measured, plan);
    }
    return {fmt::format("{} on {} \u00d7 {}, as it ran", plan.model->name, plan.gpus, plan.hardware->name),
            stamped(schema::run_report, document)};
}

} // namespace

std::string run_report_document(const RunReport& report) { return drawn(report).data; }

void write_run_report(const RunReport& report, const std::string& path) {
    const Drawn page_of = drawn(report);
    write_file(path, path.ends_with(".json") ? page_of.data : page(page_of.title, page_of.data, false));
}

} // namespace moe::tools
