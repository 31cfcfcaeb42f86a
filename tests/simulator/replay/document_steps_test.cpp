// Steps over drawn lengths of documents: their mean, how far they spread, and whom the slowest holds up.
#include "planner/machine/hardware.hpp"
#include "planner/model/document_lengths.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/replay/document_steps.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

using namespace moe;

namespace {

plan::Plan plan_of(const char* lengths) {
    plan::Plan p;
    p.model = std::make_shared<const model::Model>(families::load_model("Qwen3-30B-A3B"));
    p.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware("h100"));
    p.stack = "bridge-26.08";
    p.seq = 8192;
    p.gpus = p.dp = p.edp = 16;
    p.gbs = 64;
    p.documents = plan::Documents::mask;
    p.lengths = lengths;
    return p;
}

} // namespace

TEST_CASE("document steps: short documents cost less, and steps spread with the lengths") {
    plan::Plan plan = plan_of("200:100+1000:30+6000:2");
    plan.ep = 2, plan.edp = 8;
    REQUIRE(plan::check_plan(plan).message == "");
    const stack::Stack stack = stack::load_stack(plan.stack, *plan.hardware);
    const replay::Simulation masked = replay::simulate(plan, stack, false);
    plan::Plan whole = plan;
    whole.documents = plan::Documents::ignore;
    const replay::Simulation ignored = replay::simulate(whole, stack, false);
    CHECK(masked.core_seconds > 0.0);
    CHECK(ignored.core_seconds == 0.0);
    CHECK(masked.estimate.step_seconds < ignored.estimate.step_seconds);
    CHECK(plan::flops_per_token(plan) < plan::flops_per_token(whole));
    CHECK_FALSE(replay::document_steps(whole, 1.0, 1.0));

    const auto steps = replay::document_steps(plan, masked.core_seconds, masked.estimate.step_seconds);
    REQUIRE(steps);
    CHECK(steps->pairs == nearly(plan.masked_lengths().keys_seen(8192, 0) / 4096.0));
    // The slowest of the replicas is waited for: even the median step is longer than with mean lengths.
    CHECK(steps->step_seconds.p50 > masked.estimate.step_seconds);
    CHECK(steps->step_seconds.p99 > steps->step_seconds.p50);
    const auto again = replay::document_steps(plan, masked.core_seconds, masked.estimate.step_seconds);
    CHECK(again->step_seconds.p99 == steps->step_seconds.p99);
}

TEST_CASE("document steps: equal lengths do not spread, one replica has the mean, experts shared cost more") {
    // Documents that divide a sample are cut anew in each one; tiny ones leave samples equal.
    const auto tiny = replay::document_steps(plan_of("1:1"), 1.0, 10.0);
    CHECK(tiny->step_seconds.p99 == nearly(10.0).epsilon(1e-9));
    plan::Plan alone = plan_of("200:100+1000:10+30000:1");
    alone.gpus = alone.dp = alone.edp = 1;
    const auto one = replay::document_steps(alone, 1.0, 100.0);
    CHECK(one->step_seconds.mean == nearly(100.0).epsilon(0.02)); // 64 micro-batches of drawn samples
    plan::Plan apart = plan_of("200:100+1000:10+30000:1"), shared = apart;
    shared.ep = 16, shared.edp = 1;
    CHECK(replay::document_steps(shared, 1.0, 100.0)->step_seconds.mean >
          replay::document_steps(apart, 1.0, 100.0)->step_seconds.mean);
}
