// Latent attention's heads where every part of one is whole packs; other shapes take the kernels of mla_rope.cu.
#pragma once

#include "kernels/kernels.hpp"

namespace moe::cuda {

// These do as mla_rope and mla_rope_grad of the table; false, with nothing done, where types, addresses or widths do
// not allow it.
bool mla_rope_packs(const MlaRopeShape& s, Src q, Src kv, Src kv_down, const std::int32_t* positions, Dst q_out, Dst k,
                    Dst v, void* stream);
bool mla_rope_grad_packs(const MlaRopeShape& s, Src dq_out, Src dk, Src dv, const std::int32_t* positions, Dst dq,
                         Dst dkv, Dst dkv_down, void* stream);

} // namespace moe::cuda
