// Squares of 128 rows x 128 columns that a block of threads quantizes along their columns, and the rows beside them.
//
// Each thread has 16 neighbouring elements of some rows; what it needs of the others is the largest magnitude of each
// column, which it finds in its warp and then in shared memory.
#pragma once

#include "kernels/cuda/precision/fp8_square.cuh"
#include "kernels/cuda/precision/row_blocks.cuh"

namespace moe::cuda {

// How `threads` of a block share a square.
template <int threads>
struct Shares {
    static constexpr int rows = threads / sharers, passes = scale_block / rows; // rows at a time; rows of a thread
    static constexpr int together = scale_block * scale_block / threads / 4;    // rows of four columns of a thread
};

// The block `index` of rows of all groups, or without counts of the one that all rows are; a whole warp asks at once.
__device__ inline RowBlock block_at(const std::int32_t* counts, int groups, std::int64_t rows, std::int64_t index) {
    return counts == nullptr ? block_of_runs<scale_block>(rows, rows, index)
                             : block_of_groups<scale_block>(counts, groups, rows, index);
}

template <int threads>
struct Columns {
    SquareOf<Shares<threads>::together> square;
    uint4 largest[threads / warp_size][scale_block / 8]; // of every warp's rows: two columns in a word
    unsigned inverse[scale_block / 2]; // of the columns' scales, powers of two that BF16 holds: two in a word
};

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

// What 16 bytes stand for, exact in BF16. Sign, exponent and fraction of a byte, moved to where BF16 has them, are its
// value without the difference of the exponents' biases; subnormals as well. No byte is infinite or no number: a block
// that had one has a scale that is none.
template <bool e5m2>
__device__ Values widened(uint4 bytes, float scale) {
    constexpr unsigned bias = e5m2 ? 0x77807780u : 0x7b807b80u, magnitudes = e5m2 ? 0x0fe00fe0u : 0x07f007f0u;
    const unsigned words[] = {bytes.x, bytes.y, bytes.z, bytes.w}, by = upper_halves(scale, scale);
    Values x;
#pragma unroll
    for (int i = 0; i < Values::words; ++i) {
        const unsigned two = __byte_perm(words[i / 2], 0, i % 2 == 0 ? 0x1404 : 0x3424);
        x.word[i] = times(times((two >> (e5m2 ? 3 : 4) & magnitudes) | (two & 0x80008000u), bias), by);
    }
    return x;
}

// The largest magnitudes of a square's columns, as far as this warp has its rows; `word`: those of the thread's rows.
template <int threads>
__device__ void put_largest(Columns<threads>& shared, Values word) {
    constexpr int words = Values::words;
#pragma unroll
    for (int i = 0; i < words; ++i) {
#pragma unroll
        for (int offset = sharers; offset < warp_size; offset *= 2)
            word.word[i] = __vmaxu2(word.word[i], __shfl_xor_sync(all_lanes, word.word[i], offset));
    }
    const int lane = lane_of_warp();
    if (lane >= sharers) return;
#pragma unroll
    for (int i = 0; i < words / 4; ++i)
        shared.largest[threadIdx.x / warp_size][lane * (words / 4) + i] =
            uint4{word.word[4 * i], word.word[4 * i + 1], word.word[4 * i + 2], word.word[4 * i + 3]};
}
// The larger magnitudes of two packs.
__device__ inline void raise(Values& largest, const Values& x) {
#pragma unroll
    for (int i = 0; i < Values::words; ++i) largest.word[i] = __vmaxu2(largest.word[i], x.word[i] & 0x7fff7fffu);
}

// Where a square's columns and their scales go: `cols` of them.
struct ColumnTarget {
    std::uint8_t* to;
    float* scale;
    int cols;
};

// Two columns of each of the first 64 threads.
template <bool e5m2, int threads>
__device__ void put_scales(Columns<threads>& shared, const ColumnTarget& target) {
    const int pair = static_cast<int>(threadIdx.x);
    if (pair >= scale_block / 2 || 2 * pair >= target.cols) return;
    unsigned both = 0;
#pragma unroll
    for (const auto& of_warp : shared.largest) both = __vmaxu2(both, reinterpret_cast<const unsigned*>(of_warp)[pair]);
    const auto scale_of = [](unsigned largest) { return e5m2 ? e5m2_block(largest) : BlockScale(largest); };
    const BlockScale low = scale_of(both << 16), high = scale_of(both & 0xffff0000u);
    *reinterpret_cast<float2*>(target.scale + 2 * pair) = float2{low.scale, high.scale};
    shared.inverse[pair] = upper_halves(low.inverse, high.inverse);
}

// Four values in a byte each, by the inverses of their scales.
template <bool e5m2>
__device__ unsigned rounded_bytes(unsigned low, unsigned high, unsigned by_low, unsigned by_high) {
    const auto two_of = [](unsigned values) {
        const float2 two{__uint_as_float(values << 16), __uint_as_float(values & 0xffff0000u)};
        return static_cast<unsigned>(__nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, e5m2 ? __NV_E5M2 : __NV_E4M3));
    };
    return two_of(times(low, by_low)) | two_of(times(high, by_high)) << 16;
}

// A row's 16 elements of this thread as `quantize_rows` makes them, 128 columns sharing a scale; q: where they go, with
// the place of the block's scale. A whole warp asks; within: the row is there.
__device__ inline void put_row(Fp8Rows q, bool within, const Values& x) {
    unsigned largest = largest_of(x);
#pragma unroll
    for (int offset = sharers / 2; offset > 0; offset /= 2)
        largest = max(largest, __shfl_xor_sync(all_lanes, largest, offset));
    if (!within) return;
    const BlockScale block(largest);
    const unsigned by = upper_halves(block.inverse, block.inverse);
    const auto four = [&](int i) { return rounded_bytes<false>(x.word[2 * i], x.word[2 * i + 1], by, by); };
    *reinterpret_cast<uint4*>(q.data) = uint4{four(0), four(1), four(2), four(3)};
    if (threadIdx.x % sharers == 0) *q.scale = block.scale;
}

// Leaves the square's columns at their target; within(p): whether it has the thread's row p. beside() is done while
// others find the scales; behind(), as soon as the values are of no more use. All threads of the block call.
template <bool e5m2, int threads, class Within, class Beside, class Behind>
__device__ void put_columns(Columns<threads>& shared, const Values (&values)[Shares<threads>::passes],
                            const ColumnTarget& target, Within within, Beside beside, Behind behind) {
    constexpr int passes = Shares<threads>::passes;
    const int pack = static_cast<int>(threadIdx.x) % sharers, top = static_cast<int>(threadIdx.x) / sharers;
    Values largest{};
#pragma unroll
    for (int p = 0; p < passes; ++p) raise(largest, values[p]);
    put_largest(shared, largest);
    __syncthreads();
    put_scales<e5m2>(shared, target);
    beside();
    __syncthreads();
    unsigned word[passes][square_pack / 4];
#pragma unroll
    for (int i = 0; i < square_pack / 4; ++i) {
        const uint2 by = reinterpret_cast<const uint2*>(shared.inverse)[pack * (square_pack / 4) + i];
#pragma unroll
        for (int p = 0; p < passes; ++p)
            word[p][i] = rounded_bytes<e5m2>(values[p].word[2 * i], values[p].word[2 * i + 1], by.x, by.y);
    }
#pragma unroll
    for (int p = 0; p < passes; ++p)
        shared.square.at(p * Shares<threads>::rows + top, pack) =
            within(p) ? uint4{word[p][0], word[p][1], word[p][2], word[p][3]} : uint4{};
    behind();
    __syncthreads();
    put_transposed(shared.square, target.to, scale_block, scale_block, target.cols);
}

} // namespace moe::cuda
