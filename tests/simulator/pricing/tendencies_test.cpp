// The tendencies that must hold of any plan: faster parts make no step slower, a longer step is less of a bubble,
// recomputation gives memory for time, tensor parallelism wants the near links.
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "simulator/pricing/fast_estimator.hpp"
#include "simulator/replay/simulate.hpp"
#include "tests/simulator/pricing/random_plans.hpp"
#include "tests/support/draws.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <memory>

namespace {

using namespace moe;

// List scheduling may lose a little where something comes sooner and takes another's turn.
constexpr double anomaly = 1.01;

search::Estimate played(const plan::Plan& plan, const stack::Stack& stack) {
    return replay::simulate(plan, stack, false).estimate;
}

template <class Change>
plan::Plan on_other(plan::Plan plan, const Change& change) {
    auto hardware = std::make_shared<machine::Hardware>(*plan.hardware);
    change(*hardware);
    plan.hardware = std::move(hardware);
    return plan;
}

} // namespace

TEST_CASE("random plans: twice the rate of any part of the machine makes no step slower, and memory stays") {
    const std::uint64_t seed = seed_of_run();
    double gains[4] = {};
    for (const RandomPlan& drawn : random_plans(seed, draws(40))) {
        CAPTURE(seed);
        CAPTURE(drawn.text);
        const search::Estimate base = played(drawn.plan, drawn.stack);
        const plan::Plan others[] = {on_other(drawn.plan,
                                              [](machine::Hardware& h) {
                                                  for (double& peak : h.peak_flops) peak *= 2.0;
                                              }),
                                     on_other(drawn.plan, [](machine::Hardware& h) { h.memory_bandwidth *= 2.0; }),
                                     on_other(drawn.plan, [](machine::Hardware& h) { h.nvlink.bandwidth *= 2.0; }),
                                     on_other(drawn.plan, [](machine::Hardware& h) { h.nic.bandwidth *= 2.0; })};
        for (std::size_t i = 0; i < std::size(others); ++i) {
            CAPTURE(i);
            const search::Estimate other = played(others[i], drawn.stack);
            CHECK(other.step_seconds <= base.step_seconds * anomaly);
            CHECK(other.memory_bytes == nearly(base.memory_bytes).epsilon(1e-12));
            gains[i] += base.step_seconds / other.step_seconds - 1.0;
        }
    }
    for (const double gain : gains) CHECK(gain > 0.0);
}

TEST_CASE("random plans: more micro-batches are less of a bubble, and no token is slower") {
    const std::uint64_t seed = seed_of_run();
    for (const RandomPlan& drawn : random_plans(seed, draws(40))) {
        if (drawn.plan.pp == 1) continue;
        CAPTURE(seed);
        CAPTURE(drawn.text);
        plan::Plan twice = drawn.plan;
        twice.gbs *= 2;
        const search::Estimate one = played(drawn.plan, drawn.stack), two = played(twice, drawn.stack);
        CHECK(two.step_seconds <= 2.0 * one.step_seconds * anomaly);
        CHECK(two.step_seconds >= one.step_seconds);
        CHECK(two.breakdown.bubble / two.step_seconds <= one.breakdown.bubble / one.step_seconds + 0.01);
    }
}

TEST_CASE("random plans: full recomputation takes memory from no plan and gives time to none") {
    const std::uint64_t seed = seed_of_run();
    for (const RandomPlan& drawn : random_plans(seed, draws(40))) {
        CAPTURE(seed);
        CAPTURE(drawn.text);
        plan::Plan none = drawn.plan, full = drawn.plan;
        none.recompute = 0;
        full.recompute = plan::recompute::full;
        if (plan::check_plan(none) || plan::check_plan(full) || stack::check_stack(full, drawn.stack) ||
            none.offload != 0)
            continue;
        const search::Estimate keeps = played(none, drawn.stack), repeats = played(full, drawn.stack);
        CHECK(repeats.memory_bytes <= keeps.memory_bytes * 1.001);
        CHECK(repeats.step_seconds * anomaly >= keeps.step_seconds);
    }
}

TEST_CASE("NCCL EP groups rows on the way as HybridEP does, and costs what its share of HybridEP's rate says") {
    plan::Plan plan;
    plan.model = std::make_shared<const model::Model>(families::load_model("Qwen3-30B-A3B"));
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware("gb200-nvl72"));
    stack::Stack stack = stack::load_stack("bridge-26.10.01", *plan.hardware);
    plan.stack = stack.name;
    plan.gpus = plan.dp = 16;
    plan.ep = 16;
    plan.seq = 4096;
    plan.gbs = 64;
    plan.precision = machine::Precision::bf16;
    const auto step = [&](plan::Dispatcher dispatcher) {
        plan.dispatcher = dispatcher;
        return played(plan, stack).step_seconds;
    };
    const double hybrid = step(plan::Dispatcher::hybridep);
    CHECK(step(plan::Dispatcher::ncclep) == nearly(hybrid)); // the prior: as fast
    CHECK(step(plan::Dispatcher::alltoall) != nearly(hybrid));
    stack.costs.dispatcher.at("ncclep").nvlink *= 0.01; // more than the host's launches hide
    CHECK(step(plan::Dispatcher::ncclep) > 1.02 * hybrid);
}

TEST_CASE("tensor parallelism inside a node is faster than over its network") {
    plan::Plan plan;
    plan.model = std::make_shared<const model::Model>(families::load_model("Mixtral-8x7B"));
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware("h100"));
    const stack::Stack stack = stack::load_stack("bridge-26.08", *plan.hardware);
    plan.stack = stack.name;
    plan.gpus = 16;
    plan.tp = 8;
    plan.dp = 2;
    plan.etp = 8;
    plan.edp = 2;
    plan.seq = 4096;
    plan.gbs = 32;
    plan.mbs = 4;
    plan.precision = machine::Precision::bf16;
    plan.dispatcher = stack.usual_dispatcher;
    plan.cuda_graph = stack.usual_cuda_graph;
    const double inside = played(plan, stack).step_seconds;
    const plan::Plan apart = on_other(plan, [](machine::Hardware& h) { h.nvlink_domain = h.nvlink_domain_used = 2; });
    CHECK(played(apart, stack).step_seconds > 1.2 * inside);
}
