// Means of what devices say of power and clocks.
#include "engine/device/power_sample.hpp"

#include <algorithm>

namespace moe::device {

namespace {

double seconds_between(PowerLog::Time from, PowerLog::Time to) {
    return std::chrono::duration<double>(to - from).count();
}

} // namespace

PowerSample combined(const std::vector<PowerSample>& devices) {
    if (devices.empty()) return {};
    PowerSample all = devices.front();
    for (std::size_t i = 1; i < devices.size(); ++i) {
        all.joules += devices[i].joules;
        all.limit_watts += devices[i].limit_watts;
        all.clock_hz = std::min(all.clock_hz, devices[i].clock_hz);
        all.top_clock_hz = std::min(all.top_clock_hz, devices[i].top_clock_hz);
    }
    all.joules /= static_cast<double>(devices.size());
    all.limit_watts /= static_cast<double>(devices.size());
    return all;
}

bool PowerLog::due(Time now) const {
    return readings_.empty() || seconds_between(readings_.back().time, now) >= between_seconds;
}

void PowerLog::add(Time now, const PowerSample& power_sample) {
    if (!(power_sample.joules > 0.0)) return;
    std::erase_if(readings_, [now](const Reading& r) { return seconds_between(r.time, now) > kept_seconds; });
    readings_.push_back({now, power_sample});
}

MeanPower PowerLog::mean() const {
    constexpr double least_seconds = 1.0;
    if (readings_.empty()) return {};
    const Reading &first = readings_.front(), &last = readings_.back();
    const double seconds = seconds_between(first.time, last.time);
    if (seconds < least_seconds) return {};
    double clock = 0.0;
    for (const Reading& r : readings_) clock += r.power_sample.clock_hz / static_cast<double>(readings_.size());
    return {seconds, (last.power_sample.joules - first.power_sample.joules) / seconds, last.power_sample.limit_watts,
            clock, last.power_sample.top_clock_hz};
}

} // namespace moe::device
