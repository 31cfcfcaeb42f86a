// Files of timelines: Chrome trace JSON, plain or compressed by gzip, and traces of Perfetto.
#pragma once

#include "tools/report/perfetto.hpp"

#include <string>

namespace moe::tools {

// Writes the trace in the format that the name asks for: NAME.pftrace in Perfetto's own, NAME.json.gz as compressed
// JSON, any other as JSON. Throws Error (failure).
void write_timeline(const program::Timeline& timeline, const TracedPlans& plans, const std::string& path);

// Reads JSON as write_timeline() wrote it, plain or compressed. Throws Error (bad_input).
program::Timeline read_timeline(const std::string& path);

} // namespace moe::tools
