// Planned memory: every tensor of a Program gets its place before the run; the arena's size is the predicted peak.
#pragma once

#include "planner/program.hpp"

#include <cstdint>
#include <vector>

namespace moe {

enum class MemoryClass : std::uint8_t { weights, gradients, optimizer, saved, transient, inputs };
inline constexpr int memory_class_count = 6;
const char* to_string(MemoryClass memory_class);

struct Place {
    MemoryClass memory_class{};
    std::int64_t offset = 0; // bytes from the arena's start, instance 0
    std::int64_t stride =
        0;             // bytes between instances (saved: one per micro-batch in flight; inputs: one per micro-batch)
    int instances = 1; // instance of micro-batch i is i % instances
};

struct MemoryPlan {
    std::vector<Place> places; // by TensorId; views resolved to their base
    std::int64_t arena_bytes = 0;
    std::array<std::int64_t, memory_class_count> class_bytes{};
};

// Activations written in a chunk's forward and read in its backward are saved (one instance per micro-batch in flight);
// the others live inside one template and share one workspace, packed by first-fit over their lifetimes. Every place is
// aligned to 256 bytes. Deterministic.
MemoryPlan plan_memory(const Program& program);

// Saved bytes and workspace peaks of a lowered segment (lower_segment), the terms of the closed form.
struct SegmentMemory {
    std::int64_t saved = 0;   // one micro-batch
    std::int64_t forward = 0; // peak of transients, forward
    std::int64_t backward = 0;
};
SegmentMemory segment_memory(const Program& segment);

} // namespace moe
