// The timeline of one pipeline as SVG: a line per pipeline rank, a box per slot.
#pragma once

#include "planner/program/timeline.hpp"

#include <string>

namespace moe::tools {

// The whole step when it has few enough slots to be read; otherwise its beginning and its end, as two pictures.
std::string pipeline_svg(const program::Timeline& timeline);

} // namespace moe::tools
