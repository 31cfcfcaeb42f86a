// Corrections by runs nearby: the process by hand, estimates and bounds alike, and searches whose order stays.
#include "simulator/published/corrected_estimator.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan_fields.hpp"
#include "planner/search/refined_search.hpp"
#include "simulator/pricing/fast_estimator.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

namespace {

using namespace moe;
using published::Correction;
using published::Neighbours;

published::NeighbourModel process() {
    published::NeighbourModel m;
    m.deviation = 0.1;
    m.distance.fill(1.0);
    m.noise = {{"A", 0.05}, {"B", 0.06}, {"C", 0.16}};
    m.most = 0.35;
    m.all = {-1.0, 1.5};
    m.new_family = {-2.0, 2.0};
    m.new_system = {-0.5, 3.0};
    m.systems["h100"] = {-1.2, 1.0};
    m.coverage = {{"row", {0.8, 0.2}, {{"h100", {0.75, 0.25}}}}};
    return m;
}

stack::Workload workload(const std::string& name) {
    return {name, "family of " + name, "h100", "hopper", "bf16", "bridge-26.08", "Megatron-Bridge", 64.0, 4096.0};
}

stack::MeasuredRun run(const std::string& id, const std::string& name, double error, double noise = 0.05) {
    return {id, workload(name), error, noise};
}

plan::Plan plan_of(machine::Precision precision) {
    plan::Plan plan;
    plan.model = std::make_shared<const model::Model>(families::load_model("Qwen3-30B-A3B"));
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware("h100"));
    plan.stack = "bridge-26.08";
    plan.precision = precision;
    plan.gpus = 16, plan.gbs = 64, plan.seq = 4096;
    return plan;
}

search::SearchRequest request(std::vector<machine::Precision> precisions) {
    search::SearchRequest request;
    request.base = plan_of(machine::Precision::bf16);
    request.precisions = std::move(precisions);
    for (const char* field : {"vpp", "tp", "cp", "etp"}) request.fixed.emplace_back(field, "1");
    request.top = 3;
    return request;
}

// BF16 is predicted too fast by 20 %, FP8 too slow by 20 %.
Neighbours opposed() {
    const plan::Plan plan = plan_of(machine::Precision::bf16);
    stack::MeasuredRun slow{"bf16", published::workload_of(plan, stack::load_stack(plan.stack, *plan.hardware)), 0.2,
                            0.01},
        fast = slow;
    fast.run_id = "fp8";
    fast.workload.precision = "fp8-tensor";
    fast.log_error = -0.2;
    return {process(), {slow, fast}};
}

} // namespace

TEST_CASE("cholesky: solves, whitens, and refuses what is no covariance") {
    const published::Cholesky a({4.0, 2.0, 3.0});
    const published::Vector x = a.solve({10.0, 8.0});
    CHECK(4.0 * x[0] + 2.0 * x[1] == nearly(10.0));
    CHECK(2.0 * x[0] + 3.0 * x[1] == nearly(8.0));
    CHECK(a.whitened({2.0, 0.0})[0] == nearly(1.0));
    CHECK_THROWS_AS(published::Cholesky({1.0, 2.0, 1.0}), Error);
}

TEST_CASE("neighbours: one run corrects its workload by its share of the variance, others by their distance") {
    const Neighbours one(process(), {run("x", "a", 0.1)});
    const double share = 0.01 / (0.01 + 0.0025);
    const Correction here = one.of(workload("a"));
    CHECK(here.log_error == nearly(share * 0.1));
    CHECK(here.factor() == nearly(std::exp(share * 0.1)));
    CHECK(here.deviation == nearly(std::sqrt(0.01 * (1.0 - share) + 0.0025)));
    REQUIRE(here.nearest.size() == 1);
    CHECK(here.nearest[0].run_id == "x");
    CHECK(here.nearest[0].weight == nearly(share));
    CHECK_FALSE(here.new_family);
    CHECK(here.spread.low == nearly(-1.2)); // the system's own
    CHECK(here.spread.high == nearly(1.0));
    // Another model is of another family: both count. Twice the GPUs and half the sequence count one doubling each.
    stack::Workload far = workload("b");
    far.gpus = 128.0, far.seq = 2048.0;
    const Correction there = one.of(far);
    CHECK(there.log_error == nearly(share * 0.1 * std::exp(-4.0)));
    CHECK(there.new_family);
    CHECK(there.spread.low == nearly(-2.0));
    CHECK_FALSE(there.new_system);
    // Nothing is known of a run's own workload without it.
    CHECK(one.of(workload("a"), "x").log_error == 0.0);
    CHECK(one.of(workload("a"), "x").deviation == nearly(std::hypot(0.1, 0.05)));
    published::NeighbourModel wide = process();
    wide.unseen = 4.0;
    CHECK(published::remaining(wide, 0.1, false) == nearly(std::hypot(0.2, 0.05)));
    wide.new_release = 0.3;
    CHECK(published::remaining(wide, 0.1, false) == nearly(std::hypot(0.2, 0.05)));
    CHECK(published::remaining(wide, 0.1, true) == nearly(std::hypot(0.2, 0.05, 0.3)));
    // One run that is off by far counts as off by `most`.
    CHECK(Neighbours(process(), {run("x", "a", 2.0)}).of(workload("a")).log_error == nearly(share * 0.35));
}

TEST_CASE("neighbours: an interval is wider where no run of the release is known on the system") {
    published::NeighbourModel model = process();
    model.new_release = 0.08;
    const auto on = [](const char* hardware, const char* stack) {
        stack::MeasuredRun r = run(std::string(hardware) + stack, "a", 0.1);
        r.workload.hardware = hardware, r.workload.stack = stack;
        return r;
    };
    // The system has runs of another release, the release of another system.
    const Neighbours others(model, {on("h100", "bridge-26.04"), on("b200", "bridge-26.08")});
    const Correction unknown = others.of(workload("a"));
    CHECK(unknown.new_release);
    CHECK_FALSE(unknown.new_system);
    model.new_release = 0.0;
    const Correction plain =
        Neighbours(model, {on("h100", "bridge-26.04"), on("b200", "bridge-26.08")}).of(workload("a"));
    CHECK(unknown.log_error == nearly(plain.log_error));
    CHECK(unknown.deviation == nearly(std::hypot(plain.deviation, 0.08)));
    const Neighbours known = others.with({on("h100", "bridge-26.08")});
    CHECK_FALSE(known.of(workload("a")).new_release);
    CHECK(known.of(workload("a"), "h100bridge-26.08").new_release);
}

TEST_CASE("neighbours: a run left out is as if it had not been, and one of the same id takes its place") {
    const std::vector<stack::MeasuredRun> runs{run("x", "a", 0.1), run("y", "a", -0.05), run("z", "b", 0.2, 0.1)};
    const Neighbours all(process(), runs), without(process(), {runs[0], runs[2]});
    for (const char* name : {"a", "b", "c"}) {
        CHECK(all.of(workload(name), "y").log_error == nearly(without.of(workload(name)).log_error));
        CHECK(all.of(workload(name), "y").deviation == nearly(without.of(workload(name)).deviation));
    }
    CHECK(all.of(workload("a"), "y").rows == 2);
    const Neighbours replaced = all.with({run("y", "a", 0.3)});
    CHECK(replaced.of(workload("a")).rows == 3);
    CHECK(replaced.of(workload("a")).log_error > all.of(workload("a")).log_error);
    CHECK(all.covariance(workload("c"), workload("c")) < 0.01);
    CHECK(all.covariance(workload("a"), workload("a")) < all.covariance(workload("c"), workload("c")));
}

TEST_CASE("neighbours: the factor is a part of the step of its own") {
    Correction correction;
    correction.log_error = std::log(1.25);
    search::Estimate e;
    e.step_seconds = 2.0, e.tflops_per_gpu = 500.0, e.tokens_per_second_per_gpu = 1000.0;
    e.breakdown.compute = 2.0;
    const search::Estimate after = published::corrected(e, correction);
    CHECK(after.step_seconds == nearly(2.5));
    CHECK(after.breakdown.neighbours == nearly(0.5));
    CHECK(after.tflops_per_gpu == nearly(400.0));
    CHECK(after.tokens_per_second_per_gpu == nearly(800.0));
}

TEST_CASE("neighbours: a search keeps its order within a precision, and bounds stay bounds between two") {
    const plan::Plan base = plan_of(machine::Precision::bf16);
    const stack::Stack stack = stack::load_stack(base.stack, *base.hardware);
    pricing::FastEstimator physics(base.hardware, stack);
    published::Corrector corrector(stack, opposed());
    published::CorrectedEstimator estimator(physics, corrector);
    const auto search = [&](search::Estimator& by, std::vector<machine::Precision> precisions) {
        return search::refined_search(request(std::move(precisions)), stack, by);
    };
    const std::vector<machine::Precision> bf16{machine::Precision::bf16}, fp8{machine::Precision::fp8_tensor},
        both{machine::Precision::bf16, machine::Precision::fp8_tensor};
    const search::SearchResult before = search(physics, bf16), after = search(estimator, bf16);
    REQUIRE(before.plans.size() == after.plans.size());
    const double factor = corrector.factor(base);
    CHECK(factor > 1.15);
    for (std::size_t i = 0; i < after.plans.size(); ++i) {
        CHECK(plan::differences(before.plans[i].first, after.plans[i].first).empty());
        CHECK(after.plans[i].second.step_seconds == nearly(factor * before.plans[i].second.step_seconds));
    }
    const double slow = after.plans.front().second.step_seconds,
                 fast = search(estimator, fp8).plans.front().second.step_seconds;
    CHECK(search(estimator, both).plans.front().second.step_seconds == nearly(std::min(slow, fast)));
}

TEST_CASE("neighbours: corrected bounds do not lie above corrected estimates") {
    for (const machine::Precision precision : {machine::Precision::bf16, machine::Precision::fp8_tensor}) {
        plan::Plan plan = plan_of(precision);
        plan.ep = 8, plan.edp = 2, plan.dp = 16;
        const stack::Stack stack = stack::load_stack(plan.stack, *plan.hardware);
        pricing::FastEstimator physics(plan.hardware, stack);
        published::Corrector corrector(stack, opposed());
        published::CorrectedEstimator estimator(physics, corrector);
        const auto below = physics.bound_model(), bounds = estimator.bound_model();
        const double factor = corrector.factor(plan), step = estimator.estimate(plan).step_seconds;
        const int layers = bounds->layer_costs(plan), stages = bounds->stage_split(plan);
        const int same = below->layer_costs(plan), cut = below->stage_split(plan);
        CHECK(bounds->bound(layers, stages).step_seconds == nearly(factor * below->bound(same, cut).step_seconds));
        CHECK(bounds->bound(layers, stages).step_seconds <= step * (1.0 + search::bound_time_margin));
        CHECK(bounds->step_bound(layers) <= step * (1.0 + search::bound_time_margin));
        CHECK(bounds->early_step_bound(plan) <= step * (1.0 + search::bound_time_margin));
        CHECK(bounds->dominance_key(layers).back() == nearly(factor));
        CHECK(bounds->bound(layers, stages).memory_bytes == nearly(below->bound(same, cut).memory_bytes));
    }
}

TEST_CASE("neighbours: what is stored is read, written and refused by field") {
    const std::string text = published::to_json(process());
    const published::NeighbourModel read = published::neighbour_model_from_json(text, "n.json");
    CHECK(published::to_json(read) == text);
    CHECK(read.systems.at("h100").low == nearly(-1.2));
    CHECK(read.coverage.at(0).systems.at("h100").width == nearly(0.25));
    const auto refused = [&text](const std::string& from, const std::string& to, const char* words) {
        std::string wrong = text;
        wrong.replace(wrong.find(from), from.size(), to);
        CHECK_THROWS_WITH_AS(published::neighbour_model_from_json(wrong, "n.json"), doctest::Contains(words), Error);
    };
    refused("\"deviation\": 0.1", "\"deviation\": -1", "deviation");
    refused("\"most\"", "\"mist\"", "mist");
    refused("\"new_release\": 0.0", "\"new_release\": -1", "new_release");
    refused("0.75", "1.75", "h100");
    refused("\"gpus\"", "\"gpu\"", "gpu");
    CHECK(published::load_neighbours(stack::load_stack("bridge-26.08", *plan_of(machine::Precision::bf16).hardware)));
    CHECK_FALSE(published::load_neighbours(stack::load_stack("moe-plan", *plan_of(machine::Precision::bf16).hardware)));
}
