// Draws the front of memory against throughput around a plan.
#pragma once

#include "planner/search/whatif.hpp"

#include <string>
#include <vector>

namespace moe::tools {

// limit: bytes that a rank may hold. Empty for fewer than two points.
std::string front_svg(const std::vector<search::FrontPoint>& front, const search::Estimate& base, double limit);

// "recompute none -> moe_act, mbs 1 -> 2"; "this plan" for no change.
std::string changes_text(const std::vector<plan::FieldChange>& changes);

} // namespace moe::tools
