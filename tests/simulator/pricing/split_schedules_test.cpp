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
Plan deepseek(ScheduleKind schedule, int micro_batches) {
    Plan plan = published_plan("DeepSeek-V3", "h800", "deepseek-v3");
    plan.gpus = 256;
    plan.pp = 8;
    plan.dp = plan.ep = 32;
    plan.vpp = in_a_v(schedule) ? 2 : schedule == ScheduleKind::interleaved ? 2 : 1;
    plan.gbs = 32LL * micro_batches;
    plan.schedule = schedule;
    plan.dispatcher = Dispatcher::deepep;
    return plan;
}

Stack stack_of(const Plan& plan) { return load_stack(plan.stack, *plan.hardware); }

double bubble(const Plan& plan) {
    REQUIRE(check_plan(plan).message == "");
    const Estimate e = simulate(plan, stack_of(plan), false).estimate;
    return e.breakdown.bubble / e.step_seconds;
}

} // namespace

TEST_CASE("split backwards leave less of a bubble, most of all in a V") {
    const double plain = bubble(deepseek(ScheduleKind::one_f_one_b, 16)),
                 h1 = bubble(deepseek(ScheduleKind::zero_bubble, 16)), v = bubble(deepseek(ScheduleKind::zb_v, 16)),
                 dual = bubble(deepseek(ScheduleKind::dualpipe_v, 16));
    MESSAGE("share of the step: 1F1B ", plain, ", ZB-H1 ", h1, ", ZB-V ", v, ", DualPipeV ", dual);
    CHECK(h1 < 0.75 * plain);
    CHECK(v < 0.75 * plain);
    CHECK(dual < 0.75 * plain);
}

TEST_CASE("a forward beside a whole backward hides the exchange of DualPipeV's middle") {
    Plan apart = deepseek(ScheduleKind::dualpipe_v, 32), together = apart;
    together.ep_overlap = true;
    const double gain = simulate(apart, stack_of(apart), false).estimate.step_seconds /
                        simulate(together, stack_of(together), false).estimate.step_seconds;
    MESSAGE("gain ", gain);
    CHECK(gain > 1.05);
}

TEST_CASE("split schedules: the fast estimate against the timeline, in time and memory") {
    for (const ScheduleKind kind : {ScheduleKind::zero_bubble, ScheduleKind::zb_v, ScheduleKind::dualpipe_v})
        for (const int m : {16, 40, 77}) {
            const Plan plan = deepseek(kind, m);
            CAPTURE(to_string(kind));
            CAPTURE(m);
            FastEstimator fast(plan.hardware, stack_of(plan));
            const Estimate quick = fast.estimate(plan), played = simulate(plan, stack_of(plan), false).estimate;
            CHECK(quick.step_seconds == nearly(played.step_seconds).epsilon(0.01));
            CHECK(quick.memory_bytes == nearly(played.memory_bytes).epsilon(1e-6));
        }
}

TEST_CASE("split schedules: quotes and their floors are no higher than the estimate") {
    for (const ScheduleKind kind : {ScheduleKind::zero_bubble, ScheduleKind::zb_v, ScheduleKind::dualpipe_v})
        for (const bool overlap : {false, true}) {
            Plan plan = deepseek(kind, 24);
            if (overlap && kind != ScheduleKind::dualpipe_v) continue;
            plan.ep_overlap = overlap;
            CAPTURE(to_string(kind));
            CAPTURE(overlap);
            FastEstimator estimator(plan.hardware, stack_of(plan));
            const std::unique_ptr<Quoter> quoter = estimator.quoter();
            const int layers = quoter->layers(plan), stages = quoter->stages(plan);
            const Quote quote = quoter->quote(layers, stages);
            const Estimate estimate = estimator.estimate(plan);
            CHECK(quote.step_seconds <= estimate.step_seconds);
            CHECK(quote.memory_bytes <= estimate.memory_bytes);
            CHECK(quote.memory_bytes >= 0.55 * estimate.memory_bytes); // what dgrads wait for, above all
            CHECK(quoter->floor(layers) <= quote.step_seconds * 1.005);
            CHECK(quoter->early_floor(plan) <= quoter->floor(layers) * 1.005);
            CHECK(quoter->quote(quoter->early_layers(plan), stages).step_seconds <= quote.step_seconds * 1.005);
        }
}
