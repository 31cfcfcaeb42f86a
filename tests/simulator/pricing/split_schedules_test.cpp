// Schedules with split backwards on the clock: what they gain over 1F1B, and the fast estimate against the timeline.
#include "planner/stack/stack.hpp"
#include "simulator/pricing/fast_estimator.hpp"
#include "simulator/replay/simulate.hpp"
#include "tests/support/nearly.hpp"
#include "tests/support/published_plan.hpp"

#include <doctest/doctest.h>

#include <algorithm>

using namespace moe;

namespace {

// DeepSeek-V3 as its report trains it, on fewer GPUs: pipeline of 8, experts over 32.
plan::Plan deepseek(plan::ScheduleKind schedule, int micro_batches) {
    plan::Plan plan = published_plan("DeepSeek-V3", "h800", "deepseek-v3");
    plan.gpus = 256;
    plan.pp = 8;
    plan.dp = plan.ep = 32;
    plan.vpp = plan::in_a_v(schedule) ? 2 : schedule == plan::ScheduleKind::interleaved ? 2 : 1;
    plan.gbs = 32LL * micro_batches;
    plan.schedule = schedule;
    plan.dispatcher = plan::Dispatcher::deepep;
    return plan;
}

stack::Stack stack_of(const plan::Plan& plan) { return stack::load_stack(plan.stack, *plan.hardware); }

double bubble(const plan::Plan& plan) {
    REQUIRE(plan::check_plan(plan).message == "");
    const search::Estimate e = replay::simulate(plan, stack_of(plan), false).estimate;
    return e.breakdown.bubble / e.step_seconds;
}

} // namespace

TEST_CASE("split backwards leave less of a bubble, most of all in a V") {
    const double plain = bubble(deepseek(plan::ScheduleKind::one_f_one_b, 16)),
                 h1 = bubble(deepseek(plan::ScheduleKind::zero_bubble, 16)),
                 v = bubble(deepseek(plan::ScheduleKind::zb_v, 16)),
                 dual = bubble(deepseek(plan::ScheduleKind::dualpipe_v, 16));
    MESSAGE("share of the step: 1F1B ", plain, ", ZB-H1 ", h1, ", ZB-V ", v, ", DualPipeV ", dual);
    CHECK(h1 < 0.75 * plain);
    CHECK(v < 0.75 * plain);
    CHECK(dual < 0.75 * plain);
}

TEST_CASE("a forward beside a whole backward hides the exchange of DualPipeV's middle") {
    plan::Plan apart = deepseek(plan::ScheduleKind::dualpipe_v, 32), together = apart;
    together.ep_overlap = true;
    const double gain = replay::simulate(apart, stack_of(apart), false).estimate.step_seconds /
                        replay::simulate(together, stack_of(together), false).estimate.step_seconds;
    MESSAGE("gain ", gain);
    CHECK(gain > 1.02);
}

TEST_CASE("split schedules: the fast estimate against the timeline, in time and memory") {
    for (const plan::ScheduleKind kind :
         {plan::ScheduleKind::zero_bubble, plan::ScheduleKind::zb_v, plan::ScheduleKind::dualpipe_v})
        for (const int m : {16, 40, 77}) {
            const plan::Plan plan = deepseek(kind, m);
            CAPTURE(plan::to_string(kind));
            CAPTURE(m);
            pricing::FastEstimator fast(plan.hardware, stack_of(plan));
            const search::Estimate quick = fast.estimate(plan),
                                   played = replay::simulate(plan, stack_of(plan), false).estimate;
            CHECK(quick.step_seconds == nearly(played.step_seconds).epsilon(0.01));
            CHECK(quick.memory_bytes == nearly(played.memory_bytes).epsilon(1e-6));
        }
}

TEST_CASE("split schedules: bounds and their floors are no higher than the estimate") {
    for (const plan::ScheduleKind kind :
         {plan::ScheduleKind::zero_bubble, plan::ScheduleKind::zb_v, plan::ScheduleKind::dualpipe_v})
        for (const bool overlap : {false, true}) {
            plan::Plan plan = deepseek(kind, 24);
            if (overlap && kind != plan::ScheduleKind::dualpipe_v) continue;
            plan.ep_overlap = overlap;
            CAPTURE(plan::to_string(kind));
            CAPTURE(overlap);
            pricing::FastEstimator estimator(plan.hardware, stack_of(plan));
            const std::unique_ptr<search::BoundModel> bound_model = estimator.bound_model();
            const int layers = bound_model->layer_costs(plan), stages = bound_model->stage_split(plan);
            const search::LowerBound bound = bound_model->bound(layers, stages);
            const search::Estimate estimate = estimator.estimate(plan);
            CHECK(bound.step_seconds <= estimate.step_seconds);
            CHECK(bound.memory_bytes <= estimate.memory_bytes);
            CHECK(bound.memory_bytes >= 0.55 * estimate.memory_bytes); // what dgrads wait for, above all
            CHECK(bound_model->step_bound(layers) <= bound.step_seconds * 1.005);
            CHECK(bound_model->early_step_bound(plan) <= bound_model->step_bound(layers) * 1.005);
            CHECK(bound_model->bound(bound_model->early_layer_costs(plan), stages).step_seconds <=
                  bound.step_seconds * 1.005);
        }
}
