// Start, end and busy time of every op that a rank runs, in buffers that are laid out before the run.
#pragma once

#include "planner/program/fwd.hpp"
#include "planner/program/timeline.hpp"

#include <chrono>
#include <cstddef>
#include <vector>

namespace moe::run {

class Recorder {
public:
    using Clock = std::chrono::steady_clock;

    // Keeps the times of the last `kept` steps.
    Recorder(const program::Program& program, int rank, int kept);

    void begin_step(std::size_t step, Clock::time_point zero);
    // Ops report in the order of OpWalk. Times in seconds from the step's zero.
    void record(double start, double end, double busy) { current_[next_++] = {start, end, busy}; }
    double seconds_since(Clock::time_point time) const { return std::chrono::duration<double>(time - zero_).count(); }

    // Rows of one of the last `kept` steps, in order of start.
    std::vector<program::TimelineRow> rows(std::size_t step) const;
    std::size_t ops() const { return rows_.size(); }

private:
    struct Times {
        double start = 0.0, end = 0.0, busy = 0.0;
    };
    std::vector<program::TimelineRow> rows_; // rows with everything but the times
    std::vector<std::vector<Times>> steps_;
    Times* current_ = nullptr;
    std::size_t next_ = 0;
    Clock::time_point zero_;
};

} // namespace moe::run
