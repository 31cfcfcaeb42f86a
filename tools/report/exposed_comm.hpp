// How much of a measured step is communication that nothing hides.
#pragma once

#include "planner/program/timeline.hpp"

namespace moe::tools {

// Seconds of the step in which a rank communicates, or waits to, and no other op of it runs; mean over ranks.
double exposed_communication(const program::Timeline& timeline);

} // namespace moe::tools
