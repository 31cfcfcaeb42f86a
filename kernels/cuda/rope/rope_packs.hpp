// Rotary embedding of heads that consist of whole packs; other shapes take the kernels of rope.cu.
#pragma once

#include "kernels/kernels.hpp"

namespace moe::cuda {

// The operands of rope_grad that are read.
struct RopeGradients {
    Src dout;
    const std::int32_t* positions;
    Src qkv, wq, wk;
    const float* rstd;
};

// These do as rope and rope_grad of the table; false, with nothing done, where types, addresses or widths do not allow
// it.
bool rope_packs(const RopeShape& s, Src qkv, const std::int32_t* positions, Src wq, Src wk, Dst out, float* rstd,
                void* stream);
bool rope_grad_packs(const RopeShape& s, const RopeGradients& in, Dst dqkv, float* dwq, float* dwk, void* stream);

} // namespace moe::cuda
