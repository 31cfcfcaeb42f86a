// Products of values in MXFP8 or NVFP4 on tensor cores that scale blocks: packing, and the library's call.
#pragma once

#include "kernels/block_scaled.hpp"

#include <cstdint>

namespace moe {

// Device memory that the first such product takes, for packed operands.
inline constexpr std::int64_t block_scaled_scratch = std::int64_t{256} << 20;

// Whether the current device has such tensor cores, compute capability 10.x, and cuBLASLt is there to drive them.
bool cuda_scales_blocks();

// kernels.gemm() of BF16 operands that hold values of `format` in whole blocks of the contracted index, for devices of
// cuda_scales_blocks(). Sums are FP32. False, and nothing has happened, where it is not taken: sizes that are no
// multiples of 32, addresses of no 16 bytes, a shape that the library refuses, or a stream other than the first of the
// device that asked. Compiled, not run: no device of ours has such tensor cores.
bool cuda_block_scaled_gemm(RoundFormat format, const GemmShape& shape, Src a, Src b, Dst c, void* stream);

// pack_blocks() of kernels/block_scaled.hpp, to the bit, on every device. `t` holds the bits of the power of two, which
// a product multiplies by; for mxfp8 it is not touched. In whole rows x must be aligned to 16 bytes.
void cuda_pack_blocks(const BlockShape& shape, const void* x, std::uint8_t* codes, std::uint8_t* scales, unsigned* t,
                      void* stream);

} // namespace moe
