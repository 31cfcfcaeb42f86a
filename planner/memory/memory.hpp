// Planned memory: every tensor of a Program gets its place before the run; the arena's size is the predicted peak.
#pragma once

#include "planner/program/fwd.hpp"
#include "planner/program/op_kind.hpp"
#include "planner/program/tensor.hpp"

#include <array>
#include <cstdint>
#include <map>
#include <vector>

namespace moe::memory {

enum class MemoryClass : std::uint8_t { weights, gradients, optimizer, saved, transient, inputs };
inline constexpr int memory_class_count = 6;
const char* to_string(MemoryClass memory_class);

// Places start at multiples of 256 bytes.
constexpr std::int64_t aligned(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

struct Place {
    MemoryClass memory_class{};
    std::int64_t offset = 0; // bytes from the arena's start, instance 0
    std::int64_t stride = 0; // bytes between instances
    int instances = 1;       // inputs: one per micro-batch; saved: as many as the pool of its block has
    int block = -1;          // saved: index into MemoryPlan::blocks
};

// The saved activations of one layer of one chunk, which come and go together. Blocks of one size share a pool of
// instances, since the chunks of a rank are not all full at one time.
struct SavedBlock {
    int chunk = 0, layer = -1; // layer: that of the backward ops which read them, -1 = outside of layers
    bool from_dgrad = false;   // written by dgrad for wgrad; else by the forward
    bool until_wgrad = false;  // kept for wgrad where a backward runs in two slots; false: free behind dgrad
    std::vector<program::TensorId> tensors;
    std::int64_t bytes = 0;
    int pool = 0;              // blocks of one pool lie in the same instances
    std::vector<int> instance; // instance by micro-batch
};

struct MemoryPlan {
    std::vector<Place> places; // places by TensorId; views resolved to their base
    std::vector<SavedBlock> blocks;
    std::int64_t arena_bytes = 0;
    std::array<std::int64_t, memory_class_count> class_bytes{};
    std::int64_t host_bytes = 0; // bytes of Storage::host, outside of the arena: its tensors count from its start
};

// Activations written in a chunk's forward and read in its backward are saved, from the chunk's first slot of a
// micro-batch to its last; where a backward runs in two slots, until the last of them that reads them, and so is what
// the first writes for the second. The others live inside one template and share one workspace, packed by first-fit
// over their lifetimes. In merged slots the forward takes a layer's place with its first op that touches it, the
// backward gives one free behind its last, and each has its own workspace. Every place is aligned to 256 bytes.
// Deterministic.
// `micro_batches`: so many at least have room for their inputs, as those of another Program in the same arena have.
MemoryPlan plan_memory(const program::Program& program, int micro_batches = 1);
// host_bytes of that plan, without the rest.
std::int64_t host_memory(const program::Program& program);

// Ops that an op must wait for, by template and op: the ops of the template, the latest of every other stream, that
// must have ended before the op may write, because a transient tensor that begins with it has bytes of one that ended
// with them:
using Reuses = std::vector<std::vector<std::vector<int>>>;
Reuses reuses_of(const program::Program& program);

// The parts that fill one rank's arena, component by component; all in bytes, instances in flight and alignment
// included.
struct MemoryBreakdown {
    std::array<std::int64_t, memory_class_count> classes{}; // as MemoryPlan::class_bytes; they add up to the arena
    // Share of the experts in weights, gradients and optimizer (the rest is attention, dense and shared MLPs, norms,
    // routers, embedding and head); 0 for the other classes.
    std::array<std::int64_t, memory_class_count> expert{};
    // Saved activations by the module whose op writes them: a linear's quantized input belongs to the linear, a norm's
    // output to the norm.
    std::map<program::Module, std::int64_t> saved;
    int kept = 0; // pairs of chunk and micro-batch that are saved together before a backward, at most
};
MemoryBreakdown memory_breakdown(const program::Program& program, const MemoryPlan& plan);

// Saved bytes and workspace peaks of a lowered segment (lower_segment), the terms of the closed form.
struct SegmentMemory {
    // A buffer that all layers of a stage share which have a tensor of its shape: those of offloaded activations.
    struct Shared {
        program::Dtype dtype;
        std::int64_t rows, cols, bytes;
        int count; // buffers of this shape
        bool backward;
    };
    std::int64_t saved = 0;   // one micro-batch
    std::int64_t forward = 0; // peak of transients, forward, shared buffers included
    std::int64_t backward = 0;
    std::vector<Shared> shared;
};
SegmentMemory segment_memory(const program::Program& segment);

} // namespace moe::memory
