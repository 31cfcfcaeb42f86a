// A timeline as a trace of Perfetto: protocol buffers in place of JSON, with counters of memory and links, and arrows.
#pragma once

#include "planner/memory/memory.hpp"
#include "planner/plan/fwd.hpp"
#include "planner/program/timeline.hpp"

#include <string>
#include <vector>

namespace moe::tools {

// The plans behind a timeline: `timed` gave its ops, `planned` its memory (both the plan itself but for skewed routing,
// as in replay::Simulation), and `memory` is that of each pipeline rank.
struct TracedPlans {
    const plan::Plan& timed;
    const plan::Plan& planned;
    const std::vector<memory::MemoryPlan>& memory;
};

// True where a file of this name is a trace of Perfetto rather than Chrome trace JSON: it ends with ".pftrace".
bool is_perfetto(const std::string& path);

// The bytes of a perfetto.protos.Trace. A track for the step; below it a group for each rank, in the order of ranks,
// with a track for each stream, counters of memory in use by class (GiB, in `memory_samples` intervals of the step) and
// of what each stream moves (MB/s, while it moves it). Slices are named by kind, layer and phase, and have the module
// as category, and the micro-batch. An arrow leads from each send to its receive. Times are nanoseconds.
// Source: protos/perfetto/trace/perfetto_trace.proto of Perfetto; tests hold the bytes to the schema of its package.
std::string perfetto_trace(const program::Timeline& timeline, const TracedPlans& plans);
inline constexpr int memory_samples = 1000;

} // namespace moe::tools
