// Ratios of two plans: which choices count, pairs of runs, margins and certainties by hand; and the nearest runs.
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "simulator/published/nearest.hpp"
#include "simulator/published/ratios.hpp"
#include "simulator/published/run_plan.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

namespace {

using namespace moe;

plan::Plan sample(const char* model = "Qwen3-30B-A3B") {
    plan::Plan plan;
    plan.model = std::make_shared<const model::Model>(families::load_model(model));
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware("h100"));
    plan.stack = "bridge-26.08";
    plan.gpus = plan.dp = plan.edp = 16, plan.gbs = 64, plan.seq = 4096;
    return plan;
}

published::Prediction predicted(const plan::Plan& plan, double error, const std::string& kind = "MoE") {
    published::Prediction p;
    p.model = plan.model->name;
    p.system = "H100";
    p.kind = kind;
    p.plan = plan;
    p.error = error;
    return p;
}

std::vector<published::RatioError> pairs(int count, int fields, const std::string& kind) {
    std::vector<published::RatioError> list;
    for (int i = 1; i <= count; ++i) list.push_back({kind, fields, 0.01 * i});
    return list;
}

} // namespace

TEST_CASE("choices in which plans differ: what follows from others does not count") {
    const plan::Plan a = sample();
    const auto differ = [&a](auto edit) {
        plan::Plan b = a;
        edit(b);
        return published::differing_choices(a, b);
    };
    CHECK(differ([](plan::Plan&) {}) == 0);
    CHECK(differ([](plan::Plan& p) { p.stack = "bridge-26.06", p.gpus = p.dp = p.edp = 32, p.gbs = 128; }) == 0);
    CHECK(differ([](plan::Plan& p) { p.tp = 2, p.dp = 8; }) == 1);
    CHECK(differ([](plan::Plan& p) { p.tp = 2, p.dp = 8, p.mbs = 2; }) == 2);
    CHECK(differ([](plan::Plan& p) { p.pp = 2, p.vpp = 2, p.schedule = plan::ScheduleKind::interleaved; }) == 2);
    CHECK(differ([](plan::Plan& p) { p.pp = 2, p.schedule = plan::ScheduleKind::zero_bubble; }) == 2);
}

TEST_CASE("pairs of runs are those of one workload that differ in a choice") {
    plan::Plan other = sample();
    other.mbs = 2;
    plan::Plan larger = sample();
    larger.gbs = 128;
    published::Prediction skipped = predicted(other, 0.5);
    skipped.skipped = "no price";
    const auto errors = published::ratio_errors(
        {predicted(sample(), 0.1), predicted(sample(), 0.2), skipped, predicted(other, -0.1), predicted(larger, 0.0)});
    REQUIRE(errors.size() == 2); // both of the first plan with the other one; not with each other
    CHECK(errors[0].kind == "MoE");
    CHECK(errors[0].fields == 1);
    CHECK(errors[0].log_error == nearly(std::log(1.1 / 0.9)));
    CHECK(errors[1].log_error == nearly(std::log(1.2 / 0.9)));
    const auto read = published::ratio_errors_from_json(published::ratio_errors_json(errors), "ratios.json");
    REQUIRE(read.size() == 2);
    CHECK(read[1].fields == 1);
    CHECK(read[1].log_error == nearly(errors[1].log_error).epsilon(1e-3));
    CHECK(fault_of([] {
              published::ratio_errors_from_json(R"([{"kind": "MoE", "fields": 1}])", "r.json");
          }).find("2: r.json: row 1") == 0);
}

TEST_CASE("margins and certainties are quantiles of the pairs that differ as much") {
    const plan::Plan a = sample();
    plan::Plan close = a, far = a;
    close.mbs = 2;
    far.mbs = 2, far.tp = 2, far.recompute = plan::recompute::full;
    std::vector<published::RatioError> errors = pairs(20, 1, "MoE"); // 1 % to 20 %
    for (published::RatioError& error : pairs(20, 5, "dense")) errors.push_back({"dense", 5, 10.0 * error.log_error});
    CHECK(published::ratio_margin(errors, a, a) == 0.0);
    CHECK(*published::ratio_margin(errors, a, close) == nearly(0.17));
    CHECK(*published::ratio_margin(errors, a, far) == nearly(1.7)); // no MoE pairs: those of all kinds
    CHECK_FALSE(published::ratio_margin(pairs(3, 1, "MoE"), a, close));
    CHECK(*published::certainty(errors, a, close, 0.0) == nearly(0.5));
    CHECK(*published::certainty(errors, a, close, -0.105) == nearly(0.75));
    CHECK(*published::certainty(errors, a, close, 1.0) == nearly(1.0));
    CHECK_FALSE(published::certainty({}, a, close, 1.0));
}

TEST_CASE("stored pairs: many, none of the executable stack, and close plans are told apart more easily") {
    const auto errors = published::load_ratio_errors(false);
    CHECK(errors.size() > 200);
    CHECK(published::load_ratio_errors(true).empty());
    const plan::Plan a = sample();
    plan::Plan close = a, far = a;
    close.mbs = 2;
    far.mbs = 2, far.tp = 2, far.recompute = plan::recompute::full;
    CHECK(*published::ratio_margin(errors, a, close) < *published::ratio_margin(errors, a, far));
}

TEST_CASE("nearest published runs: a run's own plan is nearest to it, and kinds of models stay apart") {
    const auto runs = published::load_runs(profiles_folder() + "/runs");
    const auto named = [&runs](const std::string& id) {
        return std::find_if(runs.begin(), runs.end(), [&id](const published::Run& r) { return r.run_id == id; });
    };
    const auto run = named("MB-26.08-DSV3-GB200-MXFP8-256g");
    REQUIRE(run != runs.end());
    published::RunPlanner planner(machine::load_coefficients());
    const plan::Plan own = planner.plan(*run).plan;
    published::PublishedRuns published_runs;
    const auto near = published_runs.nearest(own, 3);
    REQUIRE(near.size() == 3);
    CHECK(near[0].run_id == run->run_id);
    CHECK(near[0].differs_in.empty());
    CHECK(near[0].measured == nearly(*run->tflops_std));
    CHECK(near[0].predicted == nearly(near[0].measured).epsilon(0.25));
    // The same plan of two earlier releases is told once.
    for (std::size_t i = 1; i < near.size(); ++i) {
        CHECK_FALSE(near[i].differs_in.empty());
        CHECK(near[i].differs_in != std::vector<std::string>{"stack"});
    }
    const auto dense = published_runs.nearest(sample("Llama3-8B"), 5);
    CHECK(dense.size() == 5);
    for (const published::NearRun& one : dense) CHECK(planner.plan(*named(one.run_id)).kind == "dense");
    CHECK(published_runs.nearest(own, 0).empty());
}
