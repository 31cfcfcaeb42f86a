// The document of a run's page: which steps it holds, figures that are no numbers, files that are not a run's.
#include "planner/base/error.hpp"
#include "tests/tools/verbs/command.hpp"
#include "tools/report/run_file.hpp"
#include "tools/report/run_report.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <limits>

using namespace moe;
using namespace moe::tools;
using Json = nlohmann::ordered_json;

namespace {

// A predicted timeline without rows, of a plan that the command searched.
program::Timeline empty_timeline(const test::Folder& folder) {
    test::write_plan(folder, "--fix pp=2 --fix schedule=1f1b", "plan.json");
    program::Timeline timeline;
    timeline.plan_json = folder.read("plan.json");
    timeline.ranks = timeline.pipeline_rank = {0};
    timeline.represents = {1};
    timeline.step_seconds = 1.0;
    return timeline;
}

} // namespace

TEST_CASE("page of a run: a long run is thinned out, and its last step stays") {
    const test::Folder folder;
    const program::Timeline predicted = empty_timeline(folder);
    RunRecord run;
    for (int i = 1; i <= 4500; ++i) {
        StepRecord step;
        step.step = i;
        step.loss = i == 4 ? std::numeric_limits<double>::quiet_NaN() : 1.0 / i;
        step.tokens = 10;
        step.skipped = i == 7;
        step.routers = {{0, 0.0, 0.0, 1.0}, {2, 0.0, 0.0, 4.0}};
        run.steps.push_back(step);
    }
    RunReport report{predicted, nullptr, &run, {{1, 2}, {3, 4}}, "typed"};
    const Json document = Json::parse(run_report_document(report));
    CHECK(document["schema"] == "moe-plan/run-report/1");
    CHECK(document["command"] == "typed");
    CHECK(!document.contains("comparison"));
    CHECK(!document.contains("measured"));
    CHECK(document["experts"][1] == Json{{"layer", 2}, {"tokens", {3.0, 4.0}}});
    const Json& of_run = document["run"];
    CHECK(of_run["every"] == 3);
    CHECK(of_run["steps"] == 4500);
    CHECK(of_run["tokens"] == 45000.0);
    CHECK(of_run["skipped"] == Json{7});
    const Json& series = of_run["series"];
    CHECK(series["step"].size() == 1501);
    CHECK(series["step"][1] == 4);
    CHECK(series["step"].back() == 4500);
    CHECK(series["loss"][1].is_null());
    CHECK(series["hottest_mean"][0] == 2.5);
    CHECK(series["hottest_worst"][0] == 4.0);

    program::Timeline beyond = predicted;
    beyond.pipeline_rank = {99};
    const RunReport other{beyond, nullptr, nullptr, {}, ""};
    CHECK_THROWS_WITH_AS(run_report_document(other),
                         doctest::Contains("the predicted trace: pipeline_rank = 99: its plan has "), Error);
}

TEST_CASE("page of a run: what run.json lacks or holds wrongly is named") {
    const test::Folder folder;
    const auto refused = [&](const std::string& text, const std::string& words) {
        folder.write("run.json", text);
        CHECK_THROWS_WITH_AS(read_run(folder.file("run.json")), doctest::Contains(words.c_str()), Error);
    };
    refused("[]", "run.json");
    refused(R"({"schema": "moe-plan/plan/1"})", "moe-plan/execute/1");
    refused(R"({"steps": [{"step": 0}]})", "step = 0");
    refused(R"({"steps": [{"step": 1, "tokens": 1, "loss": "low"}]})", "loss");
    refused(R"({"steps": [], "backend": "cpu", "ranks": 1})", "peak_memory_gib");
    folder.write("run.json", R"({"steps": [{"step": 1, "tokens": 8, "loss": null, "routers": [{"layer": 3}]}],
        "backend": "cpu", "ranks": 2, "peak_memory_gib": 1, "unigram_entropy": 2, "predicted_step_seconds": 3,
        "measured_step_seconds": 4, "evaluations": [{"step": 1, "loss": 0.5, "tokens": 9}]})");
    const RunRecord run = read_run(folder.file("run.json"));
    REQUIRE(run.steps.size() == 1);
    CHECK(std::isnan(run.steps[0].loss));
    CHECK(run.steps[0].routers.at(0).layer == 3);
    CHECK(run.evaluations.at(0).loss == 0.5);
    CHECK(run.measured_step_seconds == 4.0);
    CHECK(read_routed(folder.file("none.csv")).empty());
}
