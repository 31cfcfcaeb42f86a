// Rows in E4M3 as a warp writes them: packs of neighbouring elements in its lanes, whose blocks of 128 share a scale.
#pragma once

#include "kernels/cuda/rows.cuh"

#include <cuda_fp8.h>

#include <stdexcept>
#include <string>

namespace moe::cuda {

// Magnitudes are compared by their bits, where NaN lies above all numbers.
__device__ inline unsigned magnitude_bits(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// fp8_scale() of kernels/fp8.hpp, from the bits of the largest magnitude.
__device__ inline float fp8_scale_of(unsigned largest) {
    if (largest >= 0x7f800000u) return __uint_as_float(0x7fc00000u);
    const unsigned exponent = (largest >> 23) + ((largest & 0x7fffffu) > 0x600000u ? 1 : 0); // 448 = 1.75 * 2^8
    return __uint_as_float((exponent < 9 ? 1 : exponent - 8) << 23);
}

// Four values as four bytes.
__device__ inline unsigned four_e4m3(const float* x, float inverse) {
    unsigned word = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float2 two{x[2 * half] * inverse, x[2 * half + 1] * inverse};
        word |= static_cast<unsigned>(__nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, __NV_E4M3)) << 16 * half;
    }
    return word;
}
__device__ inline void widen_e4m3(unsigned word, float scale, float* x) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const auto two = static_cast<__nv_fp8x2_storage_t>(word >> 16 * half);
        const float2 values = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3)));
        x[2 * half] = values.x * scale, x[2 * half + 1] = values.y * scale;
    }
}

// Pack `pack` of row `row`, W elements in this lane, to rows of `cols`. All lanes of the warp come, each with the pack
// behind that of the lane before it and the first with one that begins a block; `within`: it is one of the row's.
template <int W>
__device__ void put_quantized(Fp8Rows q, std::int64_t row, std::int64_t cols, int pack, bool within,
                              const float (&value)[W]) {
    static_assert(W == 4 || W == 8);
    constexpr int sharers = scale_block / W;
    unsigned bits = 0;
#pragma unroll
    for (int j = 0; j < W; ++j) bits = max(bits, within ? magnitude_bits(value[j]) : 0);
#pragma unroll
    for (int offset = sharers / 2; offset > 0; offset /= 2) bits = max(bits, __shfl_xor_sync(all_lanes, bits, offset));
    if (!within) return;
    const float scale = fp8_scale_of(bits), inverse = 1.0f / scale;
    if (pack % sharers == 0) q.scale[row * ceil_div(cols, std::int64_t{scale_block}) + pack / sharers] = scale;
    std::uint8_t* const to = q.data + row * cols + pack * W;
    if constexpr (W == 8) {
        const unsigned low = four_e4m3(value, inverse), high = four_e4m3(value + 4, inverse);
        asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(low), "r"(high) : "memory");
    } else {
        *reinterpret_cast<unsigned*>(to) = four_e4m3(value, inverse);
    }
}

// What BF16 makes of the values, in place.
template <int W>
__device__ void round_to_bf16(float (&value)[W]) {
#pragma unroll
    for (int j = 0; j < W; ++j) value[j] = __bfloat162float(__float2bfloat16_rn(value[j]));
}

// Kernels that quantize move 16 bytes of elements at a time: what they take.
inline void demand_packs(const char* kernel, std::initializer_list<const void*> operands, std::int64_t rows,
                         std::int64_t cols) {
    constexpr int held = 16;
    for (const void* p : operands) {
        if (!aligned(p)) throw std::runtime_error(std::string(kernel) + ": an operand is not aligned to 16 bytes");
    }
    if (rows % held != 0 || cols % held != 0)
        throw std::runtime_error(std::string(kernel) + ": " + std::to_string(rows) + " x " + std::to_string(cols) +
                                 " are no multiples of 16");
}

} // namespace moe::cuda
