// Bytes of weights, gradients and optimizer states on one rank, for the closed form of memory.
#pragma once

#include "simulator/estimate/segment_cache.hpp"

namespace moe {

bool is_quantized(Dtype dtype);
// A bucket as products read it: quantized weights are kept row-wise and column-wise.
double weight_bytes(const BucketSize& bucket);
Dtype gradient_dtype(const Plan& plan);
double gradient_bytes(const Plan& plan); // of one element

// Of the embedding table's gradient, as ranks that hold copies of the table pass it on when a step ends.
double passed_table_bytes(const Plan& plan);

// Of one bucket on one rank: weights and gradients; master weights and moments.
double state_bytes(const Plan& plan, const BucketSize& bucket);
double optimizer_bytes(const Plan& plan, const BucketSize& bucket);

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
ReshardedMemory resharded_memory(SegmentCache& cache, const Plan& plan, const Segments& segments);

} // namespace moe
