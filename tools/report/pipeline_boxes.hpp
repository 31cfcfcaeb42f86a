// The slots of each pipeline stage over time, as the page draws them.
#pragma once

#include "planner/plan/fwd.hpp"
#include "planner/program/timeline.hpp"

#include <nlohmann/json_fwd.hpp>

namespace moe::tools {

// The slots of the first rank of each stage as arrays [stage, kind, chunk, micro-batch, start, length, half], times in
// whole microseconds. plan: whose Programs the timeline plays, predicted or measured.
nlohmann::ordered_json pipeline_json(const program::Timeline& timeline, const plan::Plan& plan);

} // namespace moe::tools
