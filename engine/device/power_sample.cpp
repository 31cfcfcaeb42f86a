// Means of what devices say of power and clocks.
#include "engine/device/power_sample.hpp"

#include <algorithm>

namespace moe {

namespace {

double seconds_between(DrawLog::Time from, DrawLog::Time to) {
    return std::chrono::duration<double>(to - from).count();
}

} // namespace

Draw combined(const std::vector<Draw>& devices) {
    if (devices.empty()) return {};
    Draw all = devices.front();
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

bool DrawLog::due(Time now) const {
    return readings_.empty() || seconds_between(readings_.back().time, now) >= between_seconds;
}

void DrawLog::add(Time now, const Draw& draw) {
    if (!(draw.joules > 0.0)) return;
    std::erase_if(readings_, [now](const Reading& r) { return seconds_between(r.time, now) > kept_seconds; });
    readings_.push_back({now, draw});
}

MeanDraw DrawLog::mean() const {
    constexpr double least_seconds = 1.0;
    if (readings_.empty()) return {};
    const Reading &first = readings_.front(), &last = readings_.back();
    const double seconds = seconds_between(first.time, last.time);
    if (seconds < least_seconds) return {};
    double clock = 0.0;
    for (const Reading& r : readings_) clock += r.draw.clock_hz / static_cast<double>(readings_.size());
    return {seconds, (last.draw.joules - first.draw.joules) / seconds, last.draw.limit_watts, clock,
            last.draw.top_clock_hz};
}

} // namespace moe
