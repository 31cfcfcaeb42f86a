// Squares of 128 rows x 128 columns in registers, of which a block of threads leaves columns and rows in E4M3.
//
// A thread has four neighbouring rows of eight columns, so its four bytes of a column are a word, and no element passes
// through shared memory. A warp has 32 rows x 32 columns: what it reads and writes is whole sectors. Warps exchange the
// largest magnitudes of columns and of rows alone.
#pragma once

#include "kernels/cuda/precision/column_scales.cuh"

namespace moe::cuda {

inline constexpr int column_threads = 512;             // of a block
inline constexpr int packed_cols = 8, packed_rows = 4; // of a thread
inline constexpr int warps_across = 4, warps_down = 4;
inline constexpr int packs_across = 4; // threads of a warp's row

// A row's eight elements, and those of all rows of a thread.
using Eight = Pack<__nv_bfloat16, packed_cols>;
using Patch = Eight[packed_rows];

// Where a thread's patch lies in a square.
struct PatchPlace {
    int row, col;
    __device__ PatchPlace() {
        const int warp = static_cast<int>(threadIdx.x) / warp_size, lane = lane_of_warp();
        row = (warp / warps_across * (warp_size / packs_across) + lane / packs_across) * packed_rows;
        col = (warp % warps_across * packs_across + lane % packs_across) * packed_cols;
    }
};

// What warps tell each other of a square's columns, two of them in a word.
struct ColumnExchange {
    uint4 largest[warps_down][scale_block / packed_cols];
    uint4 inverse[scale_block / packed_cols]; // of the columns' scales, powers of two that BF16 holds
};
// And of its rows: the largest magnitudes of two squares side by side, in the halves of a word.
struct RowExchange {
    uint4 largest[warps_across][scale_block / packed_rows];
};

// The largest magnitudes of the columns of a warp's rows, for all threads of the block.
__device__ inline void put_largest(ColumnExchange& shared, const Patch& x) {
    static_assert(Eight::words == 4 && warp_size / packs_across == 8);
    unsigned word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        word[i] = larger(larger(larger(x[0].word[i] & 0x7fff7fffu, x[1].word[i]), x[2].word[i]), x[3].word[i]);
    // Eight threads of a column: of four words each passes on two, then one, and then meets the last.
    const int lane = lane_of_warp();
    const auto meet = [](unsigned keep, unsigned give, int apart) {
        return __vmaxu2(keep, __shfl_xor_sync(all_lanes, give, apart));
    };
    const bool far = (lane & 16) != 0, near = (lane & 8) != 0;
    const unsigned first = meet(far ? word[2] : word[0], far ? word[0] : word[2], 16),
                   second = meet(far ? word[3] : word[1], far ? word[1] : word[3], 16);
    const unsigned one = meet(near ? second : first, near ? first : second, 8), last = meet(one, one, 4);
    if ((lane & 4) != 0) return;
    const int warp = static_cast<int>(threadIdx.x) / warp_size,
              pack = warp % warps_across * packs_across + lane % packs_across;
    reinterpret_cast<unsigned*>(&shared.largest[warp / warps_across][pack])[(far ? 2 : 0) + (near ? 1 : 0)] = last;
}

// The scales of columns 2 * pair and the next one. Behind put_largest() of all warps.
__device__ inline void put_scales(ColumnExchange& shared, const ColumnTarget& target, int pair) {
    reinterpret_cast<unsigned*>(shared.inverse)[pair] = put_pair(shared.largest, target, pair);
}

// The patch's columns; rows: how many of the square's there are, behind which columns hold zeros. Behind put_scales()
// of all pairs.
__device__ inline void put_columns(const ColumnExchange& shared, const Patch& x, const ColumnTarget& target,
                                   PatchPlace at, int rows) {
    const int there = rows - at.row;
    const unsigned bytes = there >= packed_rows ? ~0u : there <= 0 ? 0u : (1u << 8 * there) - 1;
    const uint4 four = shared.inverse[at.col / packed_cols];
    const unsigned inverse[] = {four.x, four.y, four.z, four.w};
    std::uint8_t* const to = target.to + at.col * scale_block + at.row;
#pragma unroll
    for (int i = 0; i < Eight::words; ++i) {
        unsigned word[packed_rows];
#pragma unroll
        for (int p = 0; p < packed_rows; ++p) word[p] = times(x[p].word[i], inverse[i]);
        const unsigned low = four_of<false>(low_half(word[0]), low_half(word[1]), low_half(word[2]), low_half(word[3]));
        const unsigned high =
            four_of<false>(high_half(word[0]), high_half(word[1]), high_half(word[2]), high_half(word[3]));
        *reinterpret_cast<unsigned*>(to + 2 * i * scale_block) = low & bytes;
        *reinterpret_cast<unsigned*>(to + (2 * i + 1) * scale_block) = high & bytes;
    }
}

// The largest magnitudes of a warp's rows in one square and in another, for all threads of the block.
__device__ inline void put_row_largest(RowExchange& shared, const Patch& x, const Patch& other, PatchPlace at) {
    unsigned both[packed_rows];
#pragma unroll
    for (int p = 0; p < packed_rows; ++p) {
        const auto of_row = [](const Eight& row) {
            unsigned word = row.word[0] & 0x7fff7fffu;
#pragma unroll
            for (int i = 1; i < Eight::words; ++i) word = larger(word, row.word[i]);
            return word;
        };
        const unsigned first = of_row(x[p]), second = of_row(other[p]);
        both[p] = __vmaxu2(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
#pragma unroll
        for (int offset = 1; offset < packs_across; offset *= 2)
            both[p] = __vmaxu2(both[p], __shfl_xor_sync(all_lanes, both[p], offset));
    }
    if (lane_of_warp() % packs_across == 0)
        shared.largest[threadIdx.x / warp_size % warps_across][at.row / packed_rows] = {both[0], both[1], both[2],
                                                                                        both[3]};
}

// The scales of a thread's rows of both squares. Behind put_row_largest() of all warps.
struct RowScales {
    unsigned both[packed_rows];
    __device__ RowScales(const RowExchange& shared, PatchPlace at) : both() {
#pragma unroll
        for (const auto& of_warp : shared.largest) {
            const uint4 four = of_warp[at.row / packed_rows];
            both[0] = __vmaxu2(both[0], four.x), both[1] = __vmaxu2(both[1], four.y);
            both[2] = __vmaxu2(both[2], four.z), both[3] = __vmaxu2(both[3], four.w);
        }
    }
    __device__ BlockScale of(int p, bool other) const {
        return BlockScale(other ? both[p] & 0xffff0000u : both[p] << 16);
    }
};

// A row's eight elements as `quantize_rows` makes them; q: where they go, with the place of the block's scale.
__device__ inline void put_row(Fp8Rows q, const Eight& x, BlockScale block, PatchPlace at) {
    const unsigned by = upper_halves(block.inverse, block.inverse);
    unsigned word[Eight::words];
#pragma unroll
    for (int i = 0; i < Eight::words; ++i) word[i] = times(x.word[i], by);
    const auto four = [&](int i) {
        return four_of<false>(low_half(word[i]), high_half(word[i]), low_half(word[i + 1]), high_half(word[i + 1]));
    };
    const unsigned low = four(0), high = four(2);
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(q.data), "r"(low), "r"(high) : "memory");
    if (at.col == 0) *q.scale = block.scale;
}

} // namespace moe::cuda
