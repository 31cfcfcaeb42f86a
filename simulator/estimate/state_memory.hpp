// Bytes of weights, gradients and optimizer states on one rank, for the closed form of memory.
#pragma once

#include "simulator/estimate/segment_cache.hpp"

#include <vector>

namespace moe::estimate {

// Bytes of the embedding table's gradient, as ranks that hold copies of the table pass it on when a step ends.
double passed_table_bytes(const plan::Plan& plan);

// Weights and gradients of one bucket on one rank.
double state_bytes(const plan::Plan& plan, const passes::BucketSize& bucket);

// The memory of each of a stage's segments, in the order of `segments`, beside the buffers that layers before and
// behind it share.
std::vector<memory::SegmentMemory> memory_beside_shared(SegmentCache& cache, const plan::Plan& plan,
                                                        const Segments& segments);

// Peaks of the transient tensors of one chunk's templates.
struct Workspace {
    std::int64_t forward = 0, backward = 0;
};
// FSDP: workspaces with gathered weights and whole gradients (layers find two turns of buffers beside their own work),
// and saved bytes that two of a chunk's segments both count.
struct ReshardedMemory {
    Workspace workspace;
    std::int64_t counted_twice = 0;
};
ReshardedMemory resharded_memory(SegmentCache& cache, const plan::Plan& plan, const Segments& segments);

} // namespace moe::estimate
