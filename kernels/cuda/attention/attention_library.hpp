// Attention by the library, as calls over a sequence that is spread over ranks need it too.
#pragma once

#include "kernels/kernels.hpp"

#include <cuda_runtime_api.h>

namespace moe::cuda {

// One rectangle of queries and keys: neither `spread` nor `merge`; q, k, v at their first element.
struct AttentionCall {
    AttentionShape s;
    Src q, k, v;
    std::int64_t lse_head = 0;  // elements of lse from one head to the next
    std::int64_t dq_stride = 0; // stride of dq's rows; 0 = as q's
};

// False, with nothing enqueued, where the library does not take the call.
bool library_attention(const AttentionCall& call, Src sinks, Dst o, float* lse, cudaStream_t stream);
// The gradient but for dsinks; dq, dk, dv at their first element.
bool library_attention_grad(const AttentionCall& call, Src dout, Src o, const float* lse, Dst dq, Dst dk, Dst dv,
                            cudaStream_t stream);
// Memory beside what these calls use themselves; the next call of a stream yields the same.
char* library_scratch(cudaStream_t stream, std::int64_t bytes);

// These do one step of a ring over spread sequences: `s` as the table's functions have it, operands too.
bool spread_attention(const AttentionShape& s, Src q, Src k, Src v, Src sinks, Dst o, float* lse, cudaStream_t stream);
bool spread_attention_grad(const AttentionShape& s, Src dout, Src q, Src k, Src v, Src o, const float* lse, Dst dq,
                           Dst dk, Dst dv, cudaStream_t stream);

} // namespace moe::cuda
