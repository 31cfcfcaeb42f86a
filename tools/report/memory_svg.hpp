// Draws a rank's memory in use over the step, stacked by class, below what the plan reserves and the machine has.
#pragma once

#include "planner/memory/memory_timeline.hpp"

#include <string>
#include <vector>

namespace moe::tools {

// rest: bytes outside of the arena (context, communicators); planned: the rank's peak by the plan; limit: of the
// machine.
std::string memory_svg(const std::vector<memory::MemoryUse>& uses, double rest, double planned, double limit);

} // namespace moe::tools
