// Step times out of logged lines: by time or by tokens, of the plan's batch alone, and what is refused.
#include "planner/base/error.hpp"
#include "planner/plan/plan.hpp"
#include "tests/support/nearly.hpp"
#include "tools/report/log_comparison.hpp"

#include <doctest/doctest.h>

using namespace moe;
using namespace moe::tools;

namespace {

plan::Plan small_plan() {
    plan::Plan plan;
    plan.gpus = 4;
    plan.gbs = 32;
    plan.seq = 1000;
    return plan;
}
search::Estimate prediction() {
    search::Estimate estimate;
    estimate.step_seconds = 2.0;
    estimate.tflops_per_gpu = 300.0;
    estimate.memory_bytes = 64.0 * (1 << 30);
    return estimate;
}
LogValues step(int iteration, LogField field, double value, double batch = 0.0) {
    LogValues values;
    value_of(values, LogField::iteration) = iteration;
    value_of(values, field) = value;
    if (batch > 0.0) value_of(values, LogField::batch) = batch;
    return values;
}
TrainingLog log_of(LogField field, const std::vector<double>& values) {
    TrainingLog log;
    log.engine = "Engine";
    for (std::size_t i = 0; i < values.size(); ++i)
        log.steps.push_back(step(static_cast<int>(i) + 1, field, values[i]));
    return log;
}
LogComparison compared(const TrainingLog& log) { return compare_log(small_plan(), prediction(), log, "my.log"); }

} // namespace

TEST_CASE("compared log: seconds, TFLOPS by the plan's own FLOPs, memory and loss") {
    TrainingLog log = log_of(LogField::seconds, {30.0, 2.5, 2.5, 2.4, 2.6, 2.5, 9.0, 2.5});
    value_of(log.steps[0], LogField::loss) = 9.0;
    value_of(log.steps[7], LogField::loss) = 4.0;
    value_of(log.steps[1], LogField::tflops) = 250.0;
    value_of(log.steps[2], LogField::tflops) = 252.0;
    log.reserved_gib = 70.0;
    LogComparison c = compared(log);
    CHECK(c.measured_seconds == nearly(2.5));
    CHECK(c.measured_tflops == nearly(300.0 * 2.0 / 2.5));
    CHECK(c.error() == nearly(2.5 / 2.0 - 1.0));
    CHECK(c.logged_tflops == nearly(251.0));
    CHECK(c.predicted_memory_gib == nearly(64.0));
    CHECK(c.measured_memory_gib() == 70.0);
    CHECK(c.iterations == 6);
    CHECK(c.logged == 8);
    CHECK(c.warm_up == 1);
    REQUIRE(c.outliers.size() == 1);
    CHECK(c.outliers[0].iteration == 7);
    CHECK(c.outliers[0].seconds == 9.0);
    CHECK(c.first_loss == 9.0);
    CHECK(c.last_loss == 4.0);
    CHECK(c.time == LogTime::seconds);
    log.allocated_gib = 60.0;
    CHECK(compared(log).measured_memory_gib() == 60.0);
}

TEST_CASE("compared log: seconds by tokens of the job, or of each GPU") {
    const LogComparison job = compared(log_of(LogField::tokens_per_second, {1000.0, 16000.0, 16000.0}));
    CHECK(job.measured_seconds == nearly(2.0));
    CHECK(job.time == LogTime::tokens);
    CHECK(compared(log_of(LogField::tokens_per_second_per_gpu, {1000.0, 4000.0, 4000.0})).measured_seconds ==
          nearly(2.0));
    // A line without a figure, or with one that is no speed, tells nothing.
    TrainingLog log = log_of(LogField::seconds, {5.0, 0.0, 3.0, 3.0});
    log.steps.push_back(step(9, LogField::loss, 1.0));
    CHECK(compared(log).logged == 3);
}

TEST_CASE("compared log: another batch than the plan's is left out, or refused where there is no other") {
    TrainingLog log;
    log.engine = "Engine";
    for (int i = 1; i <= 8; ++i) log.steps.push_back(step(i, LogField::seconds, i <= 3 ? 1.0 : 2.0, i <= 3 ? 16 : 32));
    const LogComparison c = compared(log);
    CHECK(c.other_batch == 3);
    CHECK(c.iterations == 4);
    CHECK(c.measured_seconds == 2.0);
    log.steps.resize(3);
    CHECK_THROWS_WITH_AS(compared(log), doctest::Contains("my.log: a global batch of 16 sequences, the plan has 32"),
                         Error);
    TrainingLog facts = log_of(LogField::seconds, {1.0, 1.0});
    value_of(facts.facts, LogField::batch) = 64.0;
    CHECK_THROWS_WITH_AS(compared(facts), doctest::Contains("a global batch of 64 sequences, the plan has 32"), Error);
    facts.facts = {};
    value_of(facts.facts, LogField::tokens) = 64000.0;
    CHECK_THROWS_WITH_AS(compared(facts), doctest::Contains("64000 tokens a step, the plan has 32 x 1000 = 32000"),
                         Error);
    CHECK_THROWS_WITH_AS(compared(log_of(LogField::loss, {1.0, 1.0})), doctest::Contains("none of its 2 lines"), Error);
}

TEST_CASE("compared log: seconds by samples, and by the GPUs that the log tells") {
    const LogComparison c = compared(log_of(LogField::samples_per_second, {1.0, 16.0, 16.0}));
    CHECK(c.measured_seconds == nearly(2.0));
    CHECK(c.time == LogTime::samples);
    TrainingLog log = log_of(LogField::tokens_per_second_per_gpu, {1000.0, 4000.0, 4000.0});
    value_of(log.facts, LogField::gpus) = 8.0; // The plan has four.
    CHECK(compared(log).measured_seconds == nearly(1.0));
    log = log_of(LogField::seconds, {9.0, 2.0, 2.0});
    log.from_elapsed = true;
    CHECK(compared(log).time == LogTime::elapsed);
}

TEST_CASE("compared log: lines of another sequence and with skipped steps are left out") {
    TrainingLog log = log_of(LogField::seconds, {9.0, 1.0, 1.0, 3.0, 2.0, 2.0, 2.0, 2.0});
    value_of(log.steps[1], LogField::seq) = 500.0;
    value_of(log.steps[2], LogField::skipped) = 1.0;
    value_of(log.steps[3], LogField::skipped) = 0.0;
    LogComparison c = compared(log);
    CHECK(c.logged == 8);
    CHECK(c.other_batch == 1);
    CHECK(c.skipped == 1);
    CHECK(c.iterations == 4);
    CHECK(c.measured_seconds == 2.0);
    for (LogValues& step : log.steps) value_of(step, LogField::skipped) = 1.0; // There is nothing else.
    c = compared(log);
    CHECK(c.skipped == 0);
    for (LogValues& step : log.steps) value_of(step, LogField::seq) = 500.0;
    CHECK_THROWS_WITH_AS(compared(log), doctest::Contains("my.log: sequences of 500 tokens, the plan's have 1000"),
                         Error);
}
