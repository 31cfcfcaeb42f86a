// Warnings where the job of a log or a profile is unlike the plan, one by one, and none where it is like it.
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"
#include "tools/report/job_warnings.hpp"

#include <doctest/doctest.h>

#include <algorithm>

using namespace moe;
using namespace moe::tools;

namespace {

constexpr double gib_bytes = 1 << 30;

// 4 GPUs of 80 GiB and 1,000 TFLOP/s, batches of 32 sequences of 1,000 tokens, two layers of width 64.
plan::Plan small_plan() {
    plan::Plan plan;
    plan.gpus = 4;
    plan.gbs = 32;
    plan.seq = 1000;
    machine::Hardware hardware;
    hardware.name = "card";
    hardware.memory_bytes = 80.0 * gib_bytes;
    hardware.peak_flops[static_cast<std::size_t>(machine::Precision::bf16)] = 1000e12;
    plan.hardware = std::make_shared<const machine::Hardware>(hardware);
    model::Model model;
    model.hidden = 64;
    model.layers = {0, 0};
    plan.model = std::make_shared<const model::Model>(model);
    return plan;
}

// Ten steps of 2 s that fit this plan in all that they tell.
TrainingLog fitting_log() {
    TrainingLog log;
    log.engine = "Engine";
    log.reserved_gib = 60.0;
    for (int i = 1; i <= 10; ++i) {
        LogValues step;
        for (const auto& [field, value] :
             {std::pair(LogField::iteration, static_cast<double>(i)), std::pair(LogField::seconds, 2.0),
              std::pair(LogField::tokens_per_second_per_gpu, 4000.0), std::pair(LogField::tokens_per_second, 16000.0),
              std::pair(LogField::samples_per_second, 16.0), std::pair(LogField::tflops, 300.0),
              std::pair(LogField::mfu, 30.0), std::pair(LogField::reserved_gib, 60.0),
              std::pair(LogField::reserved_percent, 75.0)})
            value_of(step, field) = value;
        log.steps.push_back(step);
    }
    for (const auto& [field, value] : {std::pair(LogField::gpus, 4.0), std::pair(LogField::seq, 1000.0),
                                       std::pair(LogField::micro_batch, 1.0), std::pair(LogField::tensor_parallel, 1.0),
                                       std::pair(LogField::layers, 2.0), std::pair(LogField::hidden, 64.0)})
        value_of(log.facts, field) = value;
    return log;
}
void set(TrainingLog& log, LogField field, std::optional<double> value) {
    for (LogValues& step : log.steps) value_of(step, field) = value;
}
std::vector<std::string> warnings_of(const TrainingLog& log) {
    search::Estimate estimate;
    estimate.step_seconds = 2.0;
    estimate.tflops_per_gpu = 300.0;
    return compare_log(small_plan(), estimate, log, "my.log").warnings;
}
void check_one(const TrainingLog& log, const std::string& words) {
    const std::vector<std::string> warnings = warnings_of(log);
    REQUIRE(warnings.size() == 1);
    CHECK(warnings[0].starts_with("Engine: "));
    CHECK_MESSAGE(warnings[0].find(words) != std::string::npos, warnings[0]);
}

} // namespace

TEST_CASE("log warnings: none where the log fits, and none of what it does not tell") {
    CHECK(warnings_of(fitting_log()).empty());
    TrainingLog log = fitting_log();
    log.facts = {};
    log.reserved_gib.reset();
    for (LogValues& step : log.steps) {
        LogValues bare;
        value_of(bare, LogField::seconds) = 2.0;
        step = bare;
    }
    CHECK(warnings_of(log).empty());
}

TEST_CASE("log warnings: the job's own figures beside the plan's") {
    TrainingLog log = fitting_log();
    value_of(log.facts, LogField::seq) = 500.0;
    value_of(log.facts, LogField::pipeline_parallel) = 2.0;
    value_of(log.facts, LogField::hidden) = 128.0;
    check_one(log,
              "the job is another than the plan's: seq 500 (plan: 1000), pp 2 (plan: 1), hidden size 128 (plan: 64)");
    // Rates of the job and of a GPU tell the number of GPUs.
    log = fitting_log();
    value_of(log.facts, LogField::gpus).reset();
    set(log, LogField::tokens_per_second, 32000.0);
    set(log, LogField::tokens_per_second_per_gpu, 4000.0);
    std::vector<std::string> warnings = warnings_of(log);
    REQUIRE(warnings.size() == 2);
    CHECK(warnings[0].find("GPUs 8 (plan: 4)") != std::string::npos);
    CHECK(warnings[1].find("make 6.4e+04 tokens a step, the plan has 3.2e+04") != std::string::npos);
}

TEST_CASE("log warnings: tokens, samples and FLOPs that do not fit the plan") {
    TrainingLog log = fitting_log();
    set(log, LogField::tokens_per_second, std::nullopt);
    set(log, LogField::tokens_per_second_per_gpu, 400.0); // As where a line's time is that of ten steps.
    check_one(log, "make 3200 tokens a step, the plan has 3.2e+04");
    log = fitting_log();
    set(log, LogField::samples_per_second, 8.0);
    check_one(log, "make a batch of 16 sequences, the plan has 32");
    log = fitting_log();
    set(log, LogField::tflops, 600.0);
    set(log, LogField::mfu, 60.0);
    check_one(log, "it counts 2.00 times the FLOPs of the plan");
}

TEST_CASE("log warnings: other GPUs, by their peak and their memory") {
    TrainingLog log = fitting_log();
    set(log, LogField::mfu, 13.3);
    check_one(log, "its MFU is of a peak of 2256 TFLOP/s, the plan's card has 1000 in BF16");
    set(log, LogField::mfu, 0.5); // It is rounded too much to tell a peak.
    CHECK(warnings_of(log).empty());
    log = fitting_log();
    set(log, LogField::reserved_percent, 33.0);
    check_one(log, "its GPUs have 181.8 GiB, the plan's card has 80");
    log = fitting_log();
    value_of(log.facts, LogField::capacity_gib) = 141.0;
    check_one(log, "its GPUs have 141 GiB");
    log = fitting_log();
    set(log, LogField::reserved_percent, std::nullopt);
    log.reserved_gib = 96.0;
    check_one(log, "it held 96 GiB of a GPU, the plan's card has 80");
}

TEST_CASE("log warnings: rates of the job and of a data-parallel rank tell no other GPUs") {
    plan::Plan plan = small_plan();
    plan.pp = 2;
    TrainingLog log = fitting_log();
    value_of(log.facts, LogField::gpus).reset();
    set(log, LogField::seconds, std::nullopt);
    set(log, LogField::tokens_per_second_per_gpu, 8000.0);
    search::Estimate estimate;
    estimate.step_seconds = 2.0;
    estimate.tflops_per_gpu = 300.0;
    CHECK(compare_log(plan, estimate, log, "my.log").warnings.empty());
}

TEST_CASE("log warnings: steps that scatter, or are of two kinds") {
    TrainingLog log = fitting_log();
    for (const LogField field : {LogField::tokens_per_second_per_gpu, LogField::samples_per_second, LogField::tflops})
        set(log, field, std::nullopt);
    for (std::size_t i = 0; i < log.steps.size(); ++i) value_of(log.steps[i], LogField::seconds) = i % 2 ? 2.0 : 3.0;
    check_one(log, "80% of its steps lie");
}

TEST_CASE("log warnings: a rate that the plan's GPUs cannot reach") {
    TrainingLog log = fitting_log();
    for (LogValues& step : log.steps) {
        LogValues bare;
        value_of(bare, LogField::seconds) = 0.5; // The plan's FLOPs make 1,200 TFLOP/s of it.
        step = bare;
    }
    check_one(log, "by the plan's FLOPs a GPU would do 1200 TFLOP/s, and the plan's card can do 1000");
}

TEST_CASE("profile warnings: other GPUs, an unreachable rate, kinds without kernels, unmatched names") {
    DeviceProfile profile;
    profile.source = "Profiler";
    profile.gpu_gib = 80.0;
    ProfileComparison fits;
    fits.predicted.step = 10.0;
    fits.kernel_seconds = 8.0;
    fits.unmatched_seconds = 2.0;
    fits.rows.resize(3);
    fits.rows[0] = {"gemm", {}, false, 4, 4.0, 5.0, 0.0, 5.0};
    fits.rows[1] = {"rope", {}, false, 4, 0.0, 0.1, 0.0, 0.0}; // It takes too little to matter.
    const auto warnings = [&](const ProfileComparison& c, double tflops) {
        return profile_warnings(small_plan(), profile, c, tflops);
    };
    CHECK(warnings(fits, 400.0).empty());
    REQUIRE(warnings(fits, 1001.0).size() == 1);
    CHECK(warnings(fits, 1001.0)[0].starts_with("Profiler: by the plan's FLOPs a GPU would do 1001 TFLOP/s"));
    ProfileComparison other = fits;
    other.rows[2] = {"attention", {}, false, 4, 0.0, 1.0, 0.0, 0.0};
    other.unmatched_seconds = 4.0;
    profile.gpu_gib = 192.0;
    const std::vector<std::string> all = warnings(other, 400.0);
    REQUIRE(all.size() == 3);
    CHECK(all[0].find("its GPUs have 192 GiB, the plan's card has 80") != std::string::npos);
    CHECK(all[1].find("more than 5% of the plan's step: attention") != std::string::npos);
    CHECK(all[2].find("50% of the kernels' time") != std::string::npos);
}

TEST_CASE("log warnings: too few iterations, and steps skipped in all of them") {
    TrainingLog log = fitting_log();
    log.steps.resize(1);
    check_one(log, "its only iteration is the first, with all of the start-up");
    value_of(log.steps[0], LogField::iteration) = 40.0;
    check_one(log, "the median is of 1 iteration: give a log of more");
    log = fitting_log();
    log.steps.resize(3);
    check_one(log, "the median is of 2 iterations");
    log = fitting_log();
    set(log, LogField::skipped, 1.0);
    check_one(log, "the optimizer left out steps in every logged iteration");
}
