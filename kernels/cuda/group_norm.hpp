// The gated norm of Mamba-2: over a group's heads at once, of what its gate has multiplied.
#pragma once

#include "kernels/kernels.hpp"

#include <cuda_runtime_api.h>

namespace moe::cuda {

// As Kernels::gated_norm and gated_norm_grad for StateRule::ssd. Throw std::runtime_error for groups that are wider
// than a block holds.
void group_norm(const StateShape& shape, Src o, Src p, Src w, Dst y, cudaStream_t stream);
void group_norm_grad(const StateShape& shape, Src dy, Src o, Src p, Src w, Dst dout, Dst dp, float* dw, void* stream);

} // namespace moe::cuda
