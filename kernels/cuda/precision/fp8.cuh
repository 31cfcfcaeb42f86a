// Rows in E4M3 as a warp writes them: packs of neighbouring elements in its lanes, whose blocks of 128 share a scale.
#pragma once

#include "kernels/cuda/rows.cuh"

#include <cuda_fp8.h>

#include <stdexcept>
#include <string>

namespace moe::cuda {

inline constexpr int square_pack = 16; // elements that rows of operands are multiples of

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

// Smallest power of two that brings a magnitude to 57344, by e5m2_scale() of kernels/rounding.hpp.
__device__ inline BlockScale e5m2_block(unsigned largest) {
    BlockScale block(largest);
    if (block.scale > 0x1p-119f)
        block.scale *= 0x1p-7f, block.inverse *= 0x1p7f;
    else if (block.scale == block.scale)
        block.scale = 0x1p-126f, block.inverse = 0x1p126f;
    return block;
}

__device__ inline float widen(std::uint8_t x, bool e5m2 = false) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(x, e5m2 ? __NV_E5M2 : __NV_E4M3)));
}

// The scale of a tensor of the steps before, of window[1], or without one of its own largest magnitude.
template <bool e5m2>
__device__ BlockScale scale_of_tensor(const float* window, const float* largest) {
    const unsigned bits = __float_as_uint(window != nullptr ? *window : *largest);
    BlockScale block = e5m2 ? e5m2_block(bits) : BlockScale(bits);
    if (window != nullptr && bits == 0) block.scale = block.inverse = 1.0f;
    return block;
}

// The largest bits of a block's threads, to which [largest] is raised; all of them call. Most blocks find a larger one
// there: only those that do not go to memory one after the other.
template <int threads>
__device__ unsigned raise_largest(unsigned bits, float* largest) {
    __shared__ unsigned found[threads / warp_size];
    bits = __reduce_max_sync(all_lanes, bits);
    if (threadIdx.x % warp_size == 0) found[threadIdx.x / warp_size] = bits;
    __syncthreads();
    for (const unsigned other : found) bits = max(bits, other);
    if (largest == nullptr || threadIdx.x != 0) return bits;
    auto* const place = reinterpret_cast<unsigned*>(largest);
    if (bits > *static_cast<volatile unsigned*>(place)) atomicMax(place, bits);
    return bits;
}

// Values [first, first + 4) as four bytes.
template <bool e5m2, class T, int W>
__device__ unsigned four_bytes(const Pack<T, W>& x, int first, float inverse) {
    unsigned word = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float2 two{x[first + 2 * half] * inverse, x[first + 2 * half + 1] * inverse};
        word |= static_cast<unsigned>(__nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, e5m2 ? __NV_E5M2 : __NV_E4M3))
                << 16 * half;
    }
    return word;
}
template <class T, int W>
__device__ unsigned four_e4m3(const Pack<T, W>& x, int first, float inverse) {
    return four_bytes<false>(x, first, inverse);
}
template <bool e5m2 = false>
__device__ void widen_four(unsigned word, float scale, float* x) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const auto two = static_cast<__nv_fp8x2_storage_t>(word >> 16 * half);
        const float2 values = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, e5m2 ? __NV_E5M2 : __NV_E4M3)));
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
    for (const void* p : operands) {
        if (!aligned(p)) throw std::runtime_error(std::string(kernel) + ": an operand is not aligned to 16 bytes");
    }
    if (rows % square_pack != 0 || cols % square_pack != 0)
        throw std::runtime_error(std::string(kernel) + ": " + std::to_string(rows) + " x " + std::to_string(cols) +
                                 " are no multiples of 16");
}

} // namespace moe::cuda
