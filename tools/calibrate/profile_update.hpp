// Measurements of runs, fed back into the hardware profile that later plans are priced with.
#pragma once

#include "planner/machine/hardware.hpp"

#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace moe::tools {

struct Feedback {
    machine::Hardware hardware;                                         // hardware with the calls of the runs
    std::map<std::string, std::vector<machine::MeasuredCall>> measured; // those calls alone, by family
    std::size_t ops = 0;                                                // ops of the runs' timelines, all ranks
};

// runs: folders of execute --run-dir, the later one standing where two measured the same. from: the profile that their
// calls are added to; empty: the one that the first run's plan was made with. Left out is what its plan alone does not
// tell the time of: communication between GPUs (which waits for others), slots that run two at once, and ops on
// routed rows unless experts were evenly loaded (execute --balance forced). Throws Error (bad_input) where a folder
// holds no run, where the profile holds no measurements, and where runs and profile are of different machines.
Feedback fed_back(const std::vector<std::string>& runs, const std::string& from);

} // namespace moe::tools
