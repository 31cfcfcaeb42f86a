// What ran on devices when, as a profiler of any kind recorded it, and which of it belongs to whole steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace moe::tools {

struct DeviceEvent {               // kernel, copy or fill
    double start = 0.0, end = 0.0; // seconds from an origin of the profile's own
    std::int32_t name = 0;         // index into DeviceProfile::names
    std::int32_t device = 0;       // index into DeviceProfile::devices
    std::int32_t stream = 0;
    std::int64_t launch = -1; // number that correlates with the call that launched it; -1 = not recorded
};

struct EventName {
    std::string kernel;     // demangled name; "Memcpy HtoD ..", "Memset .." for copies and fills
    std::string collective; // name that the process group has for the collective, "" where the profile does not say
    bool operator==(const EventName&) const = default;
};

struct StepWindow { // step as the host saw it
    std::int64_t number = 0;
    double start = 0.0, end = 0.0; // seconds in the profile
};

struct DeviceProfile {
    std::string source; // "PyTorch profiler" or "Nsight Systems"
    std::vector<EventName> names;
    std::vector<std::string> devices;
    std::vector<DeviceEvent> events;
    std::vector<StepWindow> windows;                   // windows of steps, where the profile names them
    std::unordered_map<std::int64_t, double> launches; // seconds at which the host launched, by correlation
    std::optional<int> rank, world_size;               // numbers where the profile says them
    std::string gpu;                                   // name of the device, "" where the profile does not say
    std::optional<double> gpu_gib;                     // its memory
};

// Interns names: a profile has millions of events and a few hundred names.
class NameTable {
public:
    explicit NameTable(DeviceProfile& profile) : profile_(profile) {}
    // Throws Error (bad_input) naming `place` beyond 200,000 names; each is cut after 4096 bytes.
    std::int32_t name(const std::string& kernel, const std::string& collective, const std::string& place);
    std::int32_t device(const std::string& name, const std::string& place);

private:
    DeviceProfile& profile_;
    std::unordered_map<std::string, std::int32_t> names_, devices_;
};

struct ProfiledStep {
    std::int64_t number = 0;
    double seconds = 0.0; // seconds to the next step's first event, of the last to its last event's end; a mean over
                          // devices
};

// The events of whole steps. An event belongs to the step in which the host launched it, since devices run behind.
struct ProfiledSteps {
    std::vector<DeviceEvent> events; // events by device, then start
    std::vector<ProfiledStep> steps;
    double seconds = 0.0;    // seconds of one step: mean over steps and devices
    std::size_t outside = 0; // number of events of no step
    bool said = false;       // whether the number of steps was said, not found
};
// said: how many steps the whole profile holds, 0 = as its windows tell. Throws Error (bad_input) naming `place` where
// neither is known, or nothing ran.
ProfiledSteps steps_of(const DeviceProfile& profile, int said, const std::string& place);

} // namespace moe::tools
