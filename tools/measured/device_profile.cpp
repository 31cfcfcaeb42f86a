// Gives events to steps by the time of their launch.
#include "tools/measured/device_profile.hpp"

#include "planner/base/error.hpp"

#include <algorithm>
#include <map>
#include <tuple>

namespace moe::tools {

namespace {

constexpr std::size_t most_names = 200'000, most_devices = 1024, most_name_bytes = 4096;

struct Span {
    double start = 0.0, end = 0.0;
    bool any = false;
    void add(const DeviceEvent& event) {
        start = any ? std::min(start, event.start) : event.start;
        end = any ? std::max(end, event.end) : event.end;
        any = true;
    }
};

// Index of the window that holds the time; windows are sorted and do not overlap.
std::size_t window_at(const std::vector<StepWindow>& windows, double time) {
    const auto after = std::upper_bound(windows.begin(), windows.end(), time,
                                        [](double t, const StepWindow& window) { return t < window.start; });
    if (after == windows.begin()) return windows.size();
    const auto at = after - 1;
    return time < at->end ? static_cast<std::size_t>(at - windows.begin()) : windows.size();
}

std::vector<StepWindow> sorted_windows(std::vector<StepWindow> windows) {
    std::sort(windows.begin(), windows.end(),
              [](const StepWindow& a, const StepWindow& b) { return a.start < b.start; });
    for (std::size_t i = 0; i + 1 < windows.size(); ++i)
        windows[i].end = std::min(windows[i].end, windows[i + 1].start);
    return windows;
}

using StepSpans = std::vector<std::map<std::int32_t, Span>>; // spans by step, then device

// Seconds of each step, as a mean over the devices that ran something in it.
void time_steps(const StepSpans& spans, ProfiledSteps& result) {
    double total = 0.0;
    for (std::size_t i = 0; i < spans.size(); ++i) {
        double sum = 0.0;
        for (const auto& [device, span] : spans[i]) {
            double end = span.end;
            if (i + 1 < spans.size())
                if (const auto next = spans[i + 1].find(device); next != spans[i + 1].end()) end = next->second.start;
            sum += end - span.start;
        }
        result.steps[i].seconds = sum / static_cast<double>(spans[i].size());
        total += result.steps[i].seconds;
    }
    result.seconds = total / static_cast<double>(spans.size());
}

void by_windows(const DeviceProfile& profile, const std::string& place, ProfiledSteps& result) {
    const std::vector<StepWindow> windows = sorted_windows(profile.windows);
    StepSpans spans(windows.size());
    for (const DeviceEvent& event : profile.events) {
        const auto launch = profile.launches.find(event.launch);
        const std::size_t step = window_at(windows, launch == profile.launches.end() ? event.start : launch->second);
        if (step == windows.size()) {
            ++result.outside;
            continue;
        }
        spans[step][event.device].add(event);
        result.events.push_back(event);
    }
    StepSpans ran;
    for (std::size_t i = 0; i < windows.size(); ++i) {
        if (spans[i].empty()) continue;
        result.steps.push_back({windows[i].number, 0.0});
        ran.push_back(std::move(spans[i]));
    }
    if (ran.empty()) refuse("{}: nothing ran on a device within its {} steps", place, windows.size());
    time_steps(ran, result);
}

void by_number(const DeviceProfile& profile, int said, ProfiledSteps& result) {
    std::map<std::int32_t, Span> spans;
    for (const DeviceEvent& event : profile.events) spans[event.device].add(event);
    double sum = 0.0;
    for (const auto& [device, span] : spans) sum += span.end - span.start;
    result.events = profile.events;
    result.seconds = sum / static_cast<double>(spans.size()) / said;
    for (int i = 0; i < said; ++i) result.steps.push_back({i + 1, result.seconds});
    result.said = true;
}

} // namespace

std::int32_t NameTable::name(const std::string& kernel, const std::string& collective, const std::string& place) {
    const EventName entry{kernel.substr(0, most_name_bytes), collective.substr(0, most_name_bytes)};
    const auto [at, added] =
        names_.try_emplace(entry.kernel + '\n' + entry.collective, static_cast<std::int32_t>(profile_.names.size()));
    if (added) profile_.names.push_back(entry);
    if (profile_.names.size() > most_names) refuse("{}: more than {} names of kernels", place, most_names);
    return at->second;
}

std::int32_t NameTable::device(const std::string& name, const std::string& place) {
    const auto [at, added] = devices_.try_emplace(name, static_cast<std::int32_t>(profile_.devices.size()));
    if (added) profile_.devices.push_back(name);
    if (profile_.devices.size() > most_devices) refuse("{}: more than {} devices", place, most_devices);
    return at->second;
}

ProfiledSteps steps_of(const DeviceProfile& profile, int said, const std::string& place) {
    if (profile.events.empty())
        refuse("{}: no kernel of a GPU was recorded: profile with the activity CUDA, or trace cuda with Nsight", place);
    ProfiledSteps result;
    if (said > 0)
        by_number(profile, said, result);
    else if (!profile.windows.empty())
        by_windows(profile, place, result);
    else
        refuse("{}: no ProfilerStep#N tells where steps begin: say with --steps how many it holds", place);
    if (!(result.seconds > 0.0)) refuse("{}: its steps take {} s", place, result.seconds);
    std::sort(result.events.begin(), result.events.end(), [](const DeviceEvent& a, const DeviceEvent& b) {
        return std::tie(a.device, a.start, a.end) < std::tie(b.device, b.start, b.end);
    });
    return result;
}

} // namespace moe::tools
