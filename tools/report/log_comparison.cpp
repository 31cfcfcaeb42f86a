// Turns lines of a log into seconds of a step, and leaves out what is not the run at its pace.
#include "tools/report/log_comparison.hpp"

#include "planner/base/error.hpp"
#include "planner/plan/plan.hpp"
#include "tools/measured/settled.hpp"
#include "tools/print/table.hpp"

#include <algorithm>
#include <cmath>

namespace moe::tools {

namespace {

// Seconds of the step that a line tells of, directly or by its tokens per second; nothing where it tells neither.
std::optional<double> seconds_of(const LogValues& step, double tokens, int gpus, bool& from_tokens) {
    const auto positive = [](const std::optional<double>& value) { return value && *value > 1e-9 && *value < 1e12; };
    if (const auto& seconds = value_of(step, LogField::seconds); positive(seconds)) return seconds;
    const auto& whole = value_of(step, LogField::tokens_per_second);
    const auto& each = value_of(step, LogField::tokens_per_second_per_gpu);
    if (!positive(whole) && !positive(each)) return std::nullopt;
    from_tokens = true;
    return positive(whole) ? tokens / *whole : tokens / gpus / *each;
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

Timed timed_steps(const plan::Plan& plan, const TrainingLog& log, double tokens, const std::string& place,
                  LogComparison& result) {
    Timed timed;
    double other = 0.0;
    for (const LogValues& step : log.steps) {
        const auto seconds = seconds_of(step, tokens, plan.gpus, result.from_tokens);
        if (!seconds) continue;
        ++result.logged;
        if (const auto& batch = value_of(step, LogField::batch);
            batch && !same(*batch, static_cast<double>(plan.gbs))) {
            other = *batch;
            ++result.other_batch;
            continue;
        }
        timed.seconds.push_back(*seconds);
        timed.steps.push_back(&step);
    }
    if (timed.seconds.empty() && result.other_batch > 0)
        refuse("{}: a global batch of {} sequences, the plan has {}: compare with a plan of that batch", place, other,
               plan.gbs);
    if (timed.seconds.empty())
        refuse("{}: none of its {} lines of {} tells a time", place, log.steps.size(), log.engine);
    return timed;
}

} // namespace

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
    for (const LogValues* step : timed.steps)
        if (const auto& loss = value_of(*step, LogField::loss)) {
            if (!result.first_loss) result.first_loss = loss;
            result.last_loss = loss;
        }
    return result;
}

} // namespace moe::tools
