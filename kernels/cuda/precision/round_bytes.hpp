// Operands of products in FP8 with one scale for the tensor, in bytes.
#pragma once

#include "kernels/kernels.hpp"

#include <cuda_runtime_api.h>

namespace moe::cuda {

// round_operand() of e4m3 and e5m2 with RoundShape::codes, and [values[rows, cols]], BF16, that they stand for.
void round_to_bytes(const RoundShape& shape, Src x, const std::int32_t* counts, float* largest, Dst values,
                    cudaStream_t stream);

} // namespace moe::cuda
