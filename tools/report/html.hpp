// The HTML report of a replay: the page of plans with one plan inside, which asks no network.
#pragma once

#include "tools/report/explanation.hpp"

#include <string>

namespace moe::tools {

// Headline figures, walls, timeline of one pipeline, memory over time, memory against throughput, what each single
// change would do, op kinds, and where it comes from. command: as typed, empty where it is not known.
std::string html_report(const Explanation& explanation, const std::string& command);

} // namespace moe::tools
