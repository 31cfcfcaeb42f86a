// Bytes of weights, gradients and optimizer states on one rank, for the closed form of memory.
#pragma once

#include "simulator/segment_cache.hpp"

namespace moe {

bool is_quantized(Dtype dtype);
// A bucket as products read it: quantized weights are kept row-wise and column-wise.
double weight_bytes(const BucketSize& bucket);
Dtype gradient_dtype(const Plan& plan);
double gradient_bytes(const Plan& plan); // of one element

// Weights, gradients and optimizer states of one bucket on one rank.
double state_bytes(const Plan& plan, const BucketSize& bucket);

// Peaks of the transient tensors of one chunk's templates.
struct Workspace {
    std::int64_t forward = 0, backward = 0;
};
// FSDP: gathered weights and whole gradients included. Layers find two turns of buffers beside their own work, the loss
// (whose backward comes first) the weights of the last layer.
Workspace resharded_workspace(SegmentCache& cache, const Plan& plan, const Segments& segments);

} // namespace moe
