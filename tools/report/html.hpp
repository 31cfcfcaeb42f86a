// The HTML report of a replay: one self-contained page, no network, no script.
#pragma once

#include "planner/memory.hpp"
#include "planner/search.hpp"
#include "planner/timeline.hpp"

#include <string>

namespace moe::tools {

// memory: planned places of the pipeline rank that holds most, memory_rank its number.
std::string html_report(const Plan& plan, const Estimate& estimate, const Timeline& timeline, const MemoryPlan& memory,
                        int memory_rank);

} // namespace moe::tools
