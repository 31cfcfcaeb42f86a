// The deterministic backward of causal and full attention on Hopper's tensor cores, in front of the library's.
#pragma once

#include "kernels/cuda/attention/attention_library.hpp"

namespace moe::cuda {

// Bytes of scratch that ordered_attention_grad takes for a call of BF16 operands at addresses of 16 bytes; 0 where it
// does not take the call: windows, other widths than 64/64, 128/128 and 192/128, work for too few of the device's
// multiprocessors, other devices.
std::int64_t ordered_attention_bytes(const AttentionCall& call);
// As library_attention_grad; `memory` is aligned to 256 bytes. The bits depend on the shape alone.
void ordered_attention_grad(const AttentionCall& call, Src dout, Src o, const float* lse, Dst dq, Dst dk, Dst dv,
                            char* memory, cudaStream_t stream);

} // namespace moe::cuda
