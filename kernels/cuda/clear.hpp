// Fills device memory with zeros by a kernel: a CUDA graph with memset nodes is not queued in constant time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace moe::cuda {

// `bytes` from `data` on, wherever it begins. An H200 queues a graph of 1,600 kernels in 8 us of the host's time; with
// every tenth of them a memset it takes 262 us and the GPU runs the same step 25 % longer
// (docs/notes/engine-graphs.md).
void clear(void* data, std::int64_t bytes, cudaStream_t stream);

} // namespace moe::cuda
