// Goodput: the figures that Daly printed, the numerical optimum, jobs played failure by failure, and a published run.
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"
#include "simulator/goodput/checkpoint.hpp"
#include "simulator/goodput/goodput.hpp"
#include "simulator/goodput/outlook.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>

namespace {

using namespace moe;

constexpr double minute = 60.0, hour = 3600.0;

// Share of a job's time that trains: segment by segment, failures drawn one by one.
double played(const goodput::Failures& f, double interval, int segments) {
    std::mt19937_64 random(7);
    const auto until_failure = [&] { return -f.mtbf * std::log1p(-std::generate_canonical<double, 53>(random)); };
    double clock = 0.0;
    const auto passes = [&](double seconds) {
        const double failure = until_failure();
        clock += std::min(failure, seconds);
        return failure >= seconds;
    };
    for (int i = 0; i < segments; ++i)
        while (!passes(interval + f.write))
            while (!passes(f.restart)) {
            }
    return segments * interval / clock;
}

plan::Plan sample() {
    plan::Plan plan;
    plan.model = std::make_shared<const model::Model>(families::load_model("Qwen3-30B-A3B"));
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware("h100"));
    plan.stack = "bridge-26.08";
    plan.gpus = plan.dp = 16, plan.ep = 8, plan.edp = 2;
    plan.gbs = 64, plan.seq = 4096;
    return plan;
}

search::Estimate stepping(const plan::Plan& plan, double seconds) {
    search::Estimate e;
    e.step_seconds = seconds;
    e.tokens_per_second_per_gpu = static_cast<double>(plan.gbs * plan.seq) / seconds / plan.gpus;
    return e;
}

} // namespace

TEST_CASE("goodput: checkpoint intervals as Young and Daly have them") {
    // Daly 2006, figures 3 to 5: a dump takes 5 minutes, a restart 10.
    for (const auto& [mtbf, interval] : {std::pair{24.0 * hour, 117.0}, {6.0 * hour, 57.0}, {15.0 * minute, 9.1}})
        CHECK(goodput::daly_interval({mtbf, 5.0 * minute, 10.0 * minute}) / minute == nearly(interval).epsilon(0.006));
    CHECK(goodput::young_interval({6.0 * hour, 5.0 * minute, 0.0}) == nearly(hour));
    CHECK(goodput::daly_interval({hour, 3.0 * hour, 0.0}) == hour);
    CHECK(goodput::job_mtbf(50000.0, 1000) == nearly(50.0));
}

TEST_CASE("goodput: no interval is much better than Daly's, for any time to write") {
    for (const double write : {1e-6, 1e-4, 1e-2, 0.1, 0.5, 1.0, 1.9}) { // of the time between failures
        CAPTURE(write);
        const goodput::Failures f{1.0, write, 0.05};
        double best = 0.0;
        for (double interval = 1e-5; interval < 5.0; interval *= 1.001)
            best = std::max(best, goodput::goodput(f, interval));
        CHECK(goodput::goodput(f, goodput::daly_interval(f)) > 0.998 * best);
        CHECK(goodput::goodput(f, goodput::daly_interval(f)) >= goodput::goodput(f, goodput::young_interval(f)));
    }
}

TEST_CASE("goodput: the closed form is what jobs come to that are played failure by failure") {
    const goodput::Failures cases[] = {{100.0 * hour, 30.0, 10.0 * minute},
                                       {3.0 * hour, 5.0 * minute, 10.0 * minute},
                                       {20.0 * minute, minute, 10.0 * minute},
                                       {10.0 * minute, 5.0 * minute, 0.0}};
    for (const goodput::Failures& f : cases)
        for (const double times : {0.3, 1.0, 4.0}) { // Daly's interval and others
            const double interval = times * goodput::daly_interval(f);
            CHECK(goodput::goodput(f, interval) == nearly(played(f, interval, 200'000)).epsilon(0.015));
        }
    CHECK(goodput::goodput({1.0, 1e4, 0.0}, 10.0) == 0.0);
}

TEST_CASE("goodput: Llama 3 405B trained more than nine tenths of its time") {
    // arXiv 2407.21783, section 3.3: 54 days on 16,384 GPUs with 419 unexpected interruptions; 405B parameters are
    // written at 2 TB/s as FP32 masters, two moments and BF16 weights.
    const double days = 54.0 * 24.0 * hour;
    const goodput::Failures f{days / 419.0, 405e9 * 14.0 / 2e12, goodput::usual_restart_seconds};
    const double share = goodput::goodput(f, goodput::daly_interval(f));
    CHECK(share > 0.90);
    CHECK(share < 0.95);
}

TEST_CASE("checkpoints: every element is written once, by all GPUs alike") {
    plan::Plan plan = sample();
    const double parameters = static_cast<double>(model::count_parameters(*plan.model).total);
    CHECK(goodput::checkpoint_bytes(plan) == nearly(14.0 * parameters / 16.0).epsilon(0.01));
    plan.optimizer.moments = plan::Moments::bf16;
    CHECK(goodput::checkpoint_bytes(plan) == nearly(10.0 * parameters / 16.0).epsilon(0.01));
    plan = sample();
    plan.stack = "moe-plan"; // writes no weights beside the masters
    CHECK(goodput::checkpoint_bytes(plan) == nearly(12.0 * parameters / 16.0).epsilon(0.01));
    // Of two stages the one with the head writes most.
    plan = sample();
    plan.pp = 2, plan.dp = 8, plan.ep = 8, plan.edp = 1;
    CHECK(goodput::checkpoint_bytes(plan) > 14.0 * parameters / 16.0);
    CHECK(goodput::checkpoint_bytes(plan) < 1.1 * 14.0 * parameters / 16.0);
}

TEST_CASE("outlook: hours, dollars and checkpoints by hand") {
    const plan::Plan plan = sample();
    const search::Estimate estimate = stepping(plan, 2.0);
    goodput::Terms terms;
    // 64 x 4,096 tokens in two seconds: 131,072 tokens/s.
    goodput::Outlook o = goodput::outlook(plan, estimate, terms);
    CHECK(o.goodput == 1.0);
    CHECK(o.hours == nearly(1e12 / 131072.0 / hour));
    CHECK_FALSE(o.dollars);
    terms.price = 2.5;
    terms.tokens = 3e12;
    o = goodput::outlook(plan, estimate, terms);
    CHECK(o.hours == nearly(3e12 / 131072.0 / hour));
    CHECK(*o.dollars == nearly(2.5 * 16.0 * o.hours));
    CHECK(*o.dollars_per_trillion == nearly(*o.dollars / 3.0));

    terms.mtbf_hours = 16000.0;
    const goodput::Outlook failing = goodput::outlook(plan, estimate, terms);
    CHECK(failing.job_mtbf_hours == nearly(1000.0));
    CHECK(failing.write_seconds == nearly(failing.checkpoint_bytes / (2e12 / 16384.0)));
    CHECK(failing.interval_seconds == 2.0 * static_cast<double>(failing.interval_steps));
    const goodput::Failures f{1000.0 * hour, failing.write_seconds, 600.0};
    CHECK(failing.interval_seconds == nearly(goodput::daly_interval(f)).epsilon(0.001));
    CHECK(failing.hours == nearly(o.hours / goodput::goodput(f, failing.interval_seconds)));
    // Faster storage, more frequent checkpoints, more of the time trains.
    terms.storage_bandwidth *= 10.0;
    const goodput::Outlook faster = goodput::outlook(plan, estimate, terms);
    CHECK(faster.interval_steps < failing.interval_steps);
    CHECK(faster.goodput > failing.goodput);
    // An interval of one's own is taken to whole steps, one at least.
    terms.interval_seconds = 601.0;
    CHECK(goodput::outlook(plan, estimate, terms).interval_steps == 301);
    terms.interval_seconds = 0.1;
    CHECK(goodput::outlook(plan, estimate, terms).interval_steps == 1);
    CHECK(goodput::tokens_text(15e12) == "15T");
    CHECK(goodput::tokens_text(1.25e9) == "1.25B");
    CHECK(goodput::tokens_text(999.0) == "999");
}
