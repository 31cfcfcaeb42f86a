// The HTML report of a replay: one self-contained page, no network, no script.
#pragma once

#include "tools/report/explanation.hpp"

#include <string>

namespace moe::tools {

// Headline figures, walls, timeline of one pipeline, memory over time, memory against throughput, what each single
// change would do, op kinds. Follows the reader's light or dark scheme and prints.
std::string html_report(const Explanation& explanation);

} // namespace moe::tools
