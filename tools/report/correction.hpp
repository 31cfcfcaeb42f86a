// What a prediction says of its correction by runs nearby, as a line and as JSON.
#pragma once

#include "simulator/published/neighbours.hpp"

#include <nlohmann/json_fwd.hpp>

#include <string>

namespace moe::tools {

// "Corrected by runs nearby (neighbours): step x 1.034", or that nothing is; nullptr: none.
std::string correction_line(const published::Correction* correction);
// The line, and under it the runs that weigh most, each with the error of its own prediction.
std::string correction_text(const published::Correction* correction);
// {"factor", "deviation", "runs": [{"run_id", "error", "weight"}]}, or null.
nlohmann::ordered_json correction_json(const published::Correction* correction);

} // namespace moe::tools
