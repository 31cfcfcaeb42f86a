// Seconds of steps out of how long a job has run by then.
#include "tools/measured/log_reader.hpp"

#include <algorithm>

namespace moe::tools {

namespace {

// Engines say such times to whole seconds, or by an average to four digits: shorter differences would be rounding.
constexpr double enough_seconds = 20.0, least_seconds = 5.0;

std::optional<double> elapsed_of(const LogValues& step) {
    const double number = value_of(step, LogField::iteration).value_or(0.0);
    const auto& average = value_of(step, LogField::average_seconds);
    const auto& rate = value_of(step, LogField::average_steps_per_second);
    if (average && *average > 0.0) return *average * number;
    if (rate && *rate > 0.0) return number / *rate;
    return value_of(step, LogField::elapsed);
}

bool tells_time(const LogValues& step) {
    for (const LogField field : {LogField::seconds, LogField::samples_per_second, LogField::tokens_per_second,
                                 LogField::tokens_per_second_per_gpu})
        if (value_of(step, field)) return true;
    return false;
}

} // namespace

bool add_differences(std::vector<LogValues>& steps) {
    if (std::any_of(steps.begin(), steps.end(), tells_time)) return false;
    bool any = false;
    double from = 0.0, first = 0.0; // elapsed seconds and number of the line that differences are to
    bool begun = false;
    for (LogValues& step : steps) {
        const auto elapsed = elapsed_of(step);
        const auto& number = value_of(step, LogField::iteration);
        if (!elapsed || !number) continue;
        if (begun) {
            const double seconds = *elapsed - from, count = *number - first;
            const bool last = &step == &steps.back();
            if (count <= 0.0 || seconds < (last ? least_seconds : enough_seconds)) continue;
            value_of(step, LogField::seconds) = seconds / count;
            any = true;
        }
        begun = true;
        from = *elapsed;
        first = *number;
    }
    return any;
}

} // namespace moe::tools
