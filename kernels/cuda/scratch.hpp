// Memory of a stream for sums that many blocks share, between a kernel that writes them and one that adds them up.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace moe::cuda {

inline constexpr std::int64_t scratch_floats = 1 << 20;

// scratch_floats floats of the current device that are this stream's own, aligned to 256 bytes: kernels of one stream
// follow each other, those of two would run into each other. More than 8 streams of a device at a time are refused.
float* scratch_of(cudaStream_t stream);

// A counter of the current device that is this stream's own: 0 whenever a kernel begins, each leaves it so.
int* claims_of(cudaStream_t stream);

// Another stream may have the memory; to be called when nothing on the stream runs any more.
void forget_scratch(cudaStream_t stream);

} // namespace moe::cuda
