// Power and clock of the devices of a run: a GPU at the limit of its power holds less than its top clock, which is the
// first question where a measured step is longer than a predicted one.
#pragma once

#include <chrono>
#include <vector>

namespace moe::device {

// A sample of one device now, or of several: the mean, and the slowest one's clock. All zero where a device does not
// say.
struct PowerSample {
    double joules = 0.0; // joules since some time before the process began
    double limit_watts = 0.0;
    double clock_hz = 0.0, top_clock_hz = 0.0; // clock of the multiprocessors, Hz
};
PowerSample combined(const std::vector<PowerSample>& devices);

// Mean power over the end of a run.
struct MeanPower {
    double seconds = 0.0; // 0: nothing is known
    double watts = 0.0, limit_watts = 0.0;
    double clock_hz = 0.0, top_clock_hz = 0.0;
};

// Keeps readings of the last seconds.
class PowerLog {
public:
    using Time = std::chrono::steady_clock::time_point;
    static constexpr double between_seconds = 0.2; // seconds between samples; drivers count energy ten times a second
    static constexpr double kept_seconds = 4.0;    // seconds in which a GPU's clock at its limit swings about its mean

    // True where it is time for another reading.
    bool due(Time now) const;
    void add(Time now, const PowerSample& power_sample);
    // The mean of the readings kept, if they span at least a second.
    MeanPower mean() const;

private:
    struct Reading {
        Time time;
        PowerSample power_sample;
    };
    std::vector<Reading> readings_;
};

} // namespace moe::device
