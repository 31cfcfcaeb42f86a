// Memory in use over a step: what is alive at each moment of a rank's timeline, by class.
#pragma once

#include "planner/memory/memory.hpp"
#include "planner/program/fwd.hpp"

#include <array>
#include <vector>

namespace moe::memory {

struct MemoryUse {
    double from = 0.0, to = 0.0;                    // seconds from the start of the step
    std::array<double, memory_class_count> bytes{}; // the most that was in use at one time of the interval
};

// The step of `rank` in `samples` equal intervals. Weights, gradients, optimizer states and inputs are held all the
// time; an activation from the start of the first op that touches it to the end of the last one. The timeline must hold
// the rank's rows.
std::vector<MemoryUse> memory_over_time(const program::Program& program, const MemoryPlan& memory,
                                        const program::Timeline& timeline, int rank, int samples);

} // namespace moe::memory
