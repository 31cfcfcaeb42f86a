// Takes what time stamps cost out of a recorded step, so that its ops add up to the step without stamps.
#pragma once

#include <vector>

namespace moe {

// A stamp waits for the op before it and holds up the next: on an H200 a step of 1,246 ops takes 35.4 ms without stamps
// and 40.1 ms with them (profiles/measured). How much that is per stamp depends on the ops, so it is not a constant of
// the machine: it is what the same step took longer, by stamp.
class StampClock {
public:
    // Seconds from the step's begin: `ends` of the work on stream 0, ascending, as stamps say; `plain`, what the step
    // takes without stamps between ops. 0 where that is not known: then nothing is taken out.
    StampClock(std::vector<double> ends, double plain);

    // When it would have been. Ascending in `time`. No op loses more than nine tenths of its time.
    double without(double time) const;
    double stamp_seconds() const { return stamp_; }
    double removed_seconds() const;

private:
    std::vector<double> ends_, without_;
    double stamp_ = 0.0;
};

} // namespace moe
