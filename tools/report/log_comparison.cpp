// Turns lines of a log into seconds of a step, and leaves out what is not the run at its pace.
#include "tools/report/log_comparison.hpp"

#include "planner/base/error.hpp"
#include "planner/plan/plan.hpp"
#include "tools/measured/settled.hpp"
#include "tools/print/table.hpp"
#include "tools/report/job_warnings.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace moe::tools {

namespace {

bool positive(const std::optional<double>& value) { return value && *value > 1e-9 && *value < 1e12; }

// Seconds of the step that a line tells of, directly or by a rate; nothing where it tells neither.
std::optional<double> seconds_of(const LogValues& step, double sequences, double tokens, double gpus, LogTime& time) {
    if (const auto& seconds = value_of(step, LogField::seconds); positive(seconds)) return seconds;
    const auto& whole = value_of(step, LogField::tokens_per_second);
    const auto& each = value_of(step, LogField::tokens_per_second_per_gpu);
    const auto& samples = value_of(step, LogField::samples_per_second);
    if (!positive(whole) && !positive(each) && !positive(samples)) return std::nullopt;
    time = positive(whole) || positive(each) ? LogTime::tokens : LogTime::samples;
    if (positive(whole)) return tokens / *whole;
    return positive(each) ? tokens / gpus / *each : sequences / *samples;
}

bool same(double a, double b) { return std::abs(a - b) < 0.5; }

void check_facts(const plan::Plan& plan, double tokens, const LogValues& facts, const std::string& place) {
    const auto& batch = value_of(facts, LogField::batch);
    if (batch && !same(*batch, static_cast<double>(plan.gbs)))
        refuse("{}: a global batch of {} sequences, the plan has {}: compare with a plan of that batch", place, *batch,
               plan.gbs);
    const auto& said = value_of(facts, LogField::tokens);
    if (said && !same(*said, tokens))
        refuse("{}: {} tokens a step, the plan has {} x {} = {}: compare with a plan of that batch and sequence", place,
               *said, plan.gbs, plan.seq, tokens);
}

std::optional<double> median_or_none(std::vector<double> values) {
    if (values.empty()) return std::nullopt;
    std::sort(values.begin(), values.end());
    return quantile(values, 0.5);
}

struct Timed { // lines that tell a time, of the plan's batch
    std::vector<double> seconds;
    std::vector<const LogValues*> steps;
};

bool skips(const LogValues& step) { return value_of(step, LogField::skipped).value_or(0.0) > 0.0; }

// Without lines of which steps were skipped, where there are others.
Timed without_skipped(Timed all, LogComparison& result) {
    Timed kept;
    for (std::size_t i = 0; i < all.steps.size(); ++i)
        if (!skips(*all.steps[i])) {
            kept.seconds.push_back(all.seconds[i]);
            kept.steps.push_back(all.steps[i]);
        }
    if (kept.steps.empty()) return all;
    result.skipped = all.steps.size() - kept.steps.size();
    return kept;
}

Timed timed_steps(const plan::Plan& plan, const TrainingLog& log, double tokens, const std::string& place,
                  LogComparison& result) {
    Timed timed;
    double other = 0.0, other_seq = 0.0;
    const double gpus = value_of(log.facts, LogField::gpus).value_or(plan.gpus);
    for (const LogValues& step : log.steps) {
        const auto seconds = seconds_of(step, static_cast<double>(plan.gbs), tokens, gpus, result.time);
        if (!seconds) continue;
        ++result.logged;
        const double batch = value_of(step, LogField::batch).value_or(static_cast<double>(plan.gbs));
        const double seq = value_of(step, LogField::seq).value_or(static_cast<double>(plan.seq));
        if (!same(batch, static_cast<double>(plan.gbs)) || !same(seq, static_cast<double>(plan.seq))) {
            other = batch;
            other_seq = seq;
            ++result.other_batch;
            continue;
        }
        timed.seconds.push_back(*seconds);
        timed.steps.push_back(&step);
    }
    if (timed.seconds.empty() && result.other_batch > 0 && same(other, static_cast<double>(plan.gbs)))
        refuse("{}: sequences of {} tokens, the plan's have {}: compare with a plan of that length", place, other_seq,
               plan.seq);
    if (timed.seconds.empty() && result.other_batch > 0)
        refuse("{}: a global batch of {} sequences, the plan has {}: compare with a plan of that batch", place, other,
               plan.gbs);
    if (timed.seconds.empty())
        refuse("{}: none of its {} lines of {} tells a time: give a log whose lines do, or more of its lines", place,
               log.steps.size(), log.engine);
    if (log.from_elapsed) result.time = LogTime::elapsed;
    return without_skipped(std::move(timed), result);
}

} // namespace

const char* to_string(LogTime time) {
    switch (time) {
    case LogTime::seconds:
        return "time";
    case LogTime::tokens:
        return "tokens per second";
    case LogTime::samples:
        return "samples per second";
    case LogTime::elapsed:
        return "elapsed time";
    }
    return "";
}

LogComparison compare_log(const plan::Plan& plan, const search::Estimate& predicted, const TrainingLog& log,
                          const std::string& place) {
    LogComparison result;
    const double tokens = static_cast<double>(plan.gbs) * static_cast<double>(plan.seq);
    check_facts(plan, tokens, log.facts, place);
    const Timed timed = timed_steps(plan, log, tokens, place, result);
    const Settled settled = settle(timed.seconds);
    result.engine = log.engine;
    result.format = log.format;
    result.predicted_seconds = predicted.step_seconds;
    result.predicted_tflops = predicted.tflops_per_gpu;
    result.predicted_memory_gib = gib(predicted.memory_bytes);
    result.measured_seconds = settled.median;
    result.measured_tflops = predicted.tflops_per_gpu * predicted.step_seconds / settled.median;
    result.allocated_gib = log.allocated_gib;
    result.reserved_gib = log.reserved_gib;
    result.iterations = settled.used.size();
    result.warm_up = settled.warm_up;
    result.low = settled.low;
    result.high = settled.high;
    result.runs = log.runs;
    result.cut = log.cut;
    const auto number = [&](std::size_t i) {
        return static_cast<std::int64_t>(value_of(*timed.steps[i], LogField::iteration).value_or(0.0));
    };
    for (const std::size_t i : settled.outliers) result.outliers.push_back({number(i), timed.seconds[i]});
    std::vector<double> tflops;
    for (const std::size_t i : settled.used)
        if (const auto& value = value_of(*timed.steps[i], LogField::tflops)) tflops.push_back(*value);
    result.logged_tflops = median_or_none(std::move(tflops));
    std::vector<const LogValues*> used;
    for (const std::size_t i : settled.used) used.push_back(timed.steps[i]);
    result.warnings = log_warnings(plan, log, used, result);
    for (const LogValues* step : timed.steps)
        if (const auto& loss = value_of(*step, LogField::loss)) {
            if (!result.first_loss) result.first_loss = loss;
            result.last_loss = loss;
        }
    return result;
}

} // namespace moe::tools
