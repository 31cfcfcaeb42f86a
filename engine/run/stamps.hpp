// Takes what time stamps cost out of a recorded step, so that its ops add up to the step without stamps.
#pragma once

#include <vector>

namespace moe {
struct Kernels;
}
namespace moe::device {
class Device;
}

namespace moe::run {

// Seconds by which a stamp behind each holds up kernels that do next to nothing, of a queue that replays its steps; 0
// for others. Takes some milliseconds; to be asked before the device's own step is prepared.
double measured_event_overhead(device::Device& device, const Kernels& kernels);

// A stamp waits for the op before it and holds up the next: on an H200 a step of 1,246 ops takes 35.4 ms without stamps
// and 40.1 ms with them (profiles/measured). The time per stamp depends on the ops, about `usual`; and two steps
// without stamps differ as well. The time by which a recorded step is longer is shared between the two, each by how far
// it is known to vary: in a step of many short ops stamps are most of it, in one of long ops next to nothing.
class EventClock {
public:
    // Seconds from the begin of the first op: `ends` of the work on stream 0, ascending, as stamps say; `plain`, when
    // the last op ends without stamps between ops. 0 where that is not known: then nothing is taken out.
    EventClock(std::vector<double> ends, double plain, double usual);

    // The time at which an op would have ended without stamps. Ascending in `time`. No op loses more than nine tenths
    // of its time to its stamp.
    double without(double time) const;
    double event_overhead() const { return stamp_; }
    double removed_seconds() const; // seconds taken out; negative where this step was a quick one

private:
    std::vector<double> ends_, without_;
    double stamp_ = 0.0;
};

} // namespace moe::run
