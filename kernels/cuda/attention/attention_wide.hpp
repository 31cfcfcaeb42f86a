// Attention with heads from 256 to 512 columns (Gemma 4's layers that see everything), as attention and attention_grad
// of the table; sinks' own gradient is not made.
#pragma once

#include "kernels/kernels.hpp"

namespace moe::cuda {

void wide_attention(const AttentionShape& shape, Src q, Src k, Src v, Src sinks, Dst o, float* lse, void* stream);
void wide_attention_grad(const AttentionShape& shape, Src dout, Src q, Src k, Src v, Src o, const float* lse, Dst dq,
                         Dst dk, Dst dv, void* stream);

} // namespace moe::cuda
