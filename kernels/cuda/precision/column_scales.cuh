// What kernels that quantize columns of squares of 128 x 128 share: which rows a square has, and the scales of its
// columns.
#pragma once

#include "kernels/cuda/precision/fp8.cuh"
#include "kernels/cuda/precision/row_blocks.cuh"

#include <algorithm>

namespace moe::cuda {

// The block `index` of rows of all groups, or without counts of the one that all rows are; a whole warp asks at once.
__device__ inline RowBlock block_at(const std::int32_t* counts, int groups, std::int64_t rows, std::int64_t index) {
    return counts == nullptr ? block_of_runs<scale_block>(rows, rows, index)
                             : block_of_groups<scale_block>(counts, groups, rows, index);
}

// Blocks of threads that share the squares side by side, each of which goes through equally many: eight at most, and
// fewer where `row_blocks` blocks of rows alone would not come to four turns of the `resident` blocks of a
// multiprocessor.
inline unsigned blocks_across(std::int64_t row_blocks, std::int64_t cols, int resident) {
    const std::int64_t across = ceil_div(cols, std::int64_t{scale_block}),
                       turns = row_blocks * across / (std::int64_t{4} * multiprocessors() * resident);
    return static_cast<unsigned>(ceil_div(across, std::clamp<std::int64_t>(turns, 1, 8)));
}

// The product of two BF16 with two others, exact where one of each pair is a power of two.
__device__ inline unsigned times(unsigned x, unsigned by) {
    const __nv_bfloat162 product =
        __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&x), *reinterpret_cast<const __nv_bfloat162*>(&by));
    return *reinterpret_cast<const unsigned*>(&product);
}
// Two BF16 that are the upper halves of these FP32.
__device__ inline unsigned upper_halves(float low, float high) {
    return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}

// The larger of the magnitudes of two words of BF16, of which `largest` are some already; NaN lies above all numbers.
__device__ inline unsigned larger(unsigned largest, unsigned word) {
    const __nv_bfloat162 found = __hmax2_nan(*reinterpret_cast<const __nv_bfloat162*>(&largest),
                                             __habs2(*reinterpret_cast<const __nv_bfloat162*>(&word)));
    return *reinterpret_cast<const unsigned*>(&found);
}
__device__ inline float low_half(unsigned word) { return __uint_as_float(word << 16); }
__device__ inline float high_half(unsigned word) { return __uint_as_float(word & 0xffff0000u); }

// Four numbers in a byte each.
template <bool e5m2>
__device__ unsigned four_of(float a, float b, float c, float d) {
    const auto two_of = [](float low, float high) {
        return static_cast<unsigned>(
            __nv_cvt_float2_to_fp8x2(float2{low, high}, __NV_SATFINITE, e5m2 ? __NV_E5M2 : __NV_E4M3));
    };
    return two_of(a, b) | two_of(c, d) << 16;
}

// Where a square's columns and their scales go: `cols` of them.
struct ColumnTarget {
    std::uint8_t* to;
    float* scale;
    int cols;
};

// Leaves the scales of a square's columns 2 * pair and the next one, whose largest magnitudes among each warp's rows
// are halves of a word; the inverses, powers of two that BF16 holds, as halves of another.
template <int warps, int words>
__device__ unsigned put_pair(const uint4 (&largest)[warps][words], const ColumnTarget& target, int pair) {
    unsigned both = 0;
#pragma unroll
    for (const auto& of_warp : largest) both = __vmaxu2(both, reinterpret_cast<const unsigned*>(of_warp)[pair]);
    const BlockScale low(both << 16), high(both & 0xffff0000u);
    *reinterpret_cast<float2*>(target.scale + 2 * pair) = float2{low.scale, high.scale};
    return upper_halves(low.inverse, high.inverse);
}

} // namespace moe::cuda
