// Rows in E4M3 as a warp writes them: packs of neighbouring elements in its lanes, whose blocks of 128 share a scale.
#pragma once

#include "kernels/cuda/rows.cuh"

#include <cuda_fp8.h>

#include <stdexcept>
#include <string>

namespace moe::cuda {

// Bits of the largest magnitude of a pack as FP32, where NaN lies above all numbers.
template <class T, int W>
__device__ unsigned largest_of(const Pack<T, W>& x) {
    unsigned largest = 0;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (const unsigned word : x.word) largest = max(largest, word & 0x7fffffffu);
        return largest;
    } else { // A word holds two magnitudes.
#pragma unroll
        for (const unsigned word : x.word) largest = __vmaxu2(largest, word & 0x7fff7fffu);
        return max(largest << 16, largest & 0xffff0000u);
    }
}

// fp8_scale() of kernels/fp8.hpp, from the bits of the largest magnitude, and its inverse.
struct BlockScale {
    float scale, inverse;
    __device__ explicit BlockScale(unsigned largest) {
        constexpr unsigned nan = 0x7fc00000u, unit = 1u << 23; // unit: one step of the exponent
        // 448 = 1.75 * 2^8: a larger fraction carries.
        const unsigned bits = max((largest + 0x1fffffu) & ~(unit - 1), 9 * unit) - 8 * unit;
        const bool number = largest < 0x7f800000u;
        scale = __uint_as_float(number ? bits : nan);
        inverse = __uint_as_float(number ? 254 * unit - bits : nan);
    }
};

// Values [first, first + 4) as four bytes.
template <class T, int W>
__device__ unsigned four_e4m3(const Pack<T, W>& x, int first, float inverse) {
    unsigned word = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float2 two{x[first + 2 * half] * inverse, x[first + 2 * half + 1] * inverse};
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
template <class T, int W>
__device__ void put_quantized(Fp8Rows q, std::int64_t row, std::int64_t cols, int pack, bool within,
                              const Pack<T, W>& held) {
    static_assert(W == 4 || W == 8);
    constexpr int sharers = scale_block / W;
    unsigned largest = within ? largest_of(held) : 0;
#pragma unroll
    for (int offset = sharers / 2; offset > 0; offset /= 2)
        largest = max(largest, __shfl_xor_sync(all_lanes, largest, offset));
    if (!within) return;
    const BlockScale block(largest);
    if (pack % sharers == 0) q.scale[row * ceil_div(cols, std::int64_t{scale_block}) + pack / sharers] = block.scale;
    std::uint8_t* const to = q.data + row * cols + pack * W;
    if constexpr (W == 8) {
        const unsigned low = four_e4m3(held, 0, block.inverse), high = four_e4m3(held, 4, block.inverse);
        asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(low), "r"(high) : "memory");
    } else {
        *reinterpret_cast<unsigned*>(to) = four_e4m3(held, 0, block.inverse);
    }
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
