// From a step time to hours and dollars.
#include "simulator/goodput/outlook.hpp"

#include "planner/plan/plan.hpp"
#include "simulator/goodput/checkpoint.hpp"
#include "simulator/goodput/goodput.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace moe::goodput {
namespace {

// Checkpoints lie between steps.
void add_failures(Outlook& o, const plan::Plan& plan, double step_seconds, const Terms& terms) {
    o.job_mtbf_hours = job_mtbf(*terms.mtbf_hours, plan.gpus);
    o.checkpoint_bytes = checkpoint_bytes(plan);
    o.write_seconds = o.checkpoint_bytes / terms.storage_bandwidth;
    const Failures failures{o.job_mtbf_hours * 3600.0, o.write_seconds, terms.restart_seconds};
    const double wanted = terms.interval_seconds.value_or(daly_interval(failures));
    o.interval_steps = std::llround(std::clamp(wanted / step_seconds, 1.0, 1e15));
    o.interval_seconds = static_cast<double>(o.interval_steps) * step_seconds;
    o.goodput = goodput(failures, o.interval_seconds);
}

} // namespace

std::string tokens_text(double tokens) {
    for (const auto& [unit, sign] : {std::pair{1e12, "T"}, {1e9, "B"}, {1e6, "M"}})
        if (tokens >= unit) return fmt::format("{:.4g}{}", tokens / unit, sign);
    return fmt::format("{:.0f}", tokens);
}

Outlook outlook(const plan::Plan& plan, const search::Estimate& estimate, const Terms& terms) {
    Outlook o;
    if (terms.mtbf_hours) add_failures(o, plan, estimate.step_seconds, terms);
    const double tokens_per_hour = estimate.tokens_per_second_per_gpu * plan.gpus * o.goodput * 3600.0;
    o.hours = terms.budget() / tokens_per_hour;
    o.gpu_hours = o.hours * plan.gpus;
    if (terms.price) {
        o.dollars = *terms.price * o.gpu_hours;
        o.dollars_per_trillion = *o.dollars * trillion / terms.budget();
    }
    return o;
}

} // namespace moe::goodput
