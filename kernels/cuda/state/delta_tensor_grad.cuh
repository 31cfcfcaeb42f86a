// The gradients of a gated delta rule on the tensor cores, in two steps.
#pragma once

#include "kernels/cuda/state/delta_tensor.cuh"

namespace moe::cuda::delta {

// All gradients but those of states, from what Kept holds of the chunks, V' and the states' gradients included.
void run_tensor_chunks(const Rule& rule, Src dout, Dst dc, Dst dp, cudaStream_t stream);

} // namespace moe::cuda::delta
