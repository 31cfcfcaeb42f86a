// Columns in E4M3 of rows that are in E4M3 already, or in E5M2 of such: blocks of 128 rows of a group, transposed, with
// a scale for each column of a block; of rows as they lie, or of those that are copies of tokens.
//
// A warp has 128 rows of 32 columns and needs no other: a lane holds eight neighbouring rows of 16 columns, so that
// 16 lanes write a column's 128 bytes, and shared memory is not asked for.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/precision/column_scales.cuh"
#include "kernels/cuda/precision/fp8_square.cuh"

namespace moe::cuda {
namespace {

constexpr int warps = 4;    // of a block, side by side on 128 columns
constexpr int resident = 4; // blocks of a multiprocessor
constexpr int lanes_across = 2, rows_of_lane = 8, words = Values::words;
static_assert(warps * lanes_across * square_pack == scale_block &&
              warp_size / lanes_across * rows_of_lane == scale_block && words == 8);

// What 16 bytes stand for, exact in BF16. Sign, exponent and fraction of a byte, moved to where BF16 has them, are its
// value without the difference of the exponents' biases; subnormals as well. No byte is infinite or no number: a block
// that had one has a scale that is none.
template <bool e5m2>
__device__ Values widened(uint4 bytes, float scale) {
    constexpr unsigned bias = e5m2 ? 0x77807780u : 0x7b807b80u, magnitudes = e5m2 ? 0x0fe00fe0u : 0x07f007f0u;
    const unsigned four[] = {bytes.x, bytes.y, bytes.z, bytes.w}, by = upper_halves(scale, scale);
    Values x;
#pragma unroll
    for (int i = 0; i < words; ++i) {
        const unsigned two = __byte_perm(four[i / 2], 0, i % 2 == 0 ? 0x1404 : 0x3424);
        x.word[i] = times(times((two >> (e5m2 ? 3 : 4) & magnitudes) | (two & 0x80008000u), bias), by);
    }
    return x;
}

// Largest magnitudes of the columns of all lanes: of the two columns whose word this lane comes to have.
__device__ unsigned largest_of_warp(const Values& of_lane, int lane) {
    const auto meet = [&](unsigned near, unsigned far, int apart) {
        const bool second = (lane & apart) != 0;
        return __vmaxu2(second ? far : near, __shfl_xor_sync(all_lanes, second ? near : far, apart));
    };
    unsigned four[4], two[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) four[i] = meet(of_lane.word[i], of_lane.word[4 + i], 16);
#pragma unroll
    for (int i = 0; i < 2; ++i) two[i] = meet(four[i], four[2 + i], 8);
    const unsigned one = meet(two[0], two[1], 4);
    return __vmaxu2(one, __shfl_xor_sync(all_lanes, one, lanes_across));
}
// The word that a lane comes to have, and a lane that comes to have a word.
__device__ int word_of(int lane) { return lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2; }
__device__ int lane_with(int word, int side) { return word / 4 * 16 + word / 2 % 2 * 8 + word % 2 * 4 + side; }

template <bool e5m2>
__global__ void __launch_bounds__(warps* warp_size, resident)
    requantize_kernel(FilledRows s, Fp8Rows x, const std::int32_t* token_of, const std::int32_t* counts,
                      Fp8Columns to) {
    const std::int64_t index = blockIdx.x;
    const RowBlock block = block_at(counts, s.groups, s.rows, index);
    if (block.rows == 0) return;
    const int lane = lane_of_warp(), side = lane % lanes_across, row = lane / lanes_across * rows_of_lane,
              cols = static_cast<int>(s.cols), across = ceil_div(cols, static_cast<int>(scale_block)),
              left = block.rows - row; // rows of this lane and behind
    int number[rows_of_lane];
#pragma unroll
    for (int r = 0; r < rows_of_lane; ++r) {
        const std::int64_t at = block.first + row + r;
        number[r] = r >= left ? 0 : token_of == nullptr ? static_cast<int>(at) : token_of[at];
    }
    const auto bytes_of = [&](int first) {
        const int there = left - first;
        return there >= 4 ? ~0u : there <= 0 ? 0u : (1u << 8 * there) - 1;
    };
    const unsigned low_rows = bytes_of(0), high_rows = bytes_of(4);
    for (int tile = static_cast<int>(blockIdx.y); tile < across; tile += static_cast<int>(gridDim.y)) {
        const int col = tile * static_cast<int>(scale_block) +
                        (static_cast<int>(threadIdx.x) / warp_size * lanes_across + side) * square_pack;
        uint4 raw[rows_of_lane];
        float scale[rows_of_lane];
#pragma unroll
        for (int r = 0; r < rows_of_lane; ++r) {
            const bool there = r < left && col < cols;
            raw[r] = there ? *reinterpret_cast<const uint4*>(x.data + std::int64_t{number[r]} * cols + col) : uint4{};
            scale[r] = there ? x.scale[std::int64_t{number[r]} * across + tile] : 0.0f;
        }
        Values value[rows_of_lane], largest{};
#pragma unroll
        for (int r = 0; r < rows_of_lane; ++r) {
            value[r] = widened<e5m2>(raw[r], scale[r]);
#pragma unroll
            for (int i = 0; i < words; ++i) largest.word[i] = larger(largest.word[i], value[r].word[i]);
        }
        const unsigned both = largest_of_warp(largest, lane);
        const auto scale_of = [](unsigned bits) { return e5m2 ? e5m2_block(bits) : BlockScale(bits); };
        const BlockScale low = scale_of(both << 16), high = scale_of(both & 0xffff0000u);
        const std::int64_t column = index * cols + col;
        if (col < cols && (lane & lanes_across) == 0)
            *reinterpret_cast<float2*>(to.scale + column + 2 * word_of(lane)) = float2{low.scale, high.scale};
        const unsigned mine = upper_halves(low.inverse, high.inverse);
        std::uint8_t* const at = to.data + column * scale_block + row;
#pragma unroll
        for (int i = 0; i < words; ++i) {
            const unsigned by = __shfl_sync(all_lanes, mine, lane_with(i, side));
            unsigned word[rows_of_lane];
#pragma unroll
            for (int r = 0; r < rows_of_lane; ++r) word[r] = times(value[r].word[i], by);
            const auto four = [&](auto half, int r) {
                return four_of<e5m2>(half(word[r]), half(word[r + 1]), half(word[r + 2]), half(word[r + 3]));
            };
            const auto put = [&](int of_pair, auto half) {
                const unsigned first = four(half, 0) & low_rows, second = four(half, 4) & high_rows;
                asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(at + (2 * i + of_pair) * scale_block), "r"(first),
                             "r"(second)
                             : "memory");
            };
            if (col >= cols) continue;
            put(0, [](unsigned w) { return low_half(w); });
            put(1, [](unsigned w) { return high_half(w); });
        }
    }
}

void launch(const FilledRows& s, Fp8Rows x, const std::int32_t* token_of, const std::int32_t* counts, Fp8Columns to,
            void* stream) {
    const std::int64_t blocks = column_blocks(s.rows, counts == nullptr ? 1 : s.groups);
    const dim3 grid(static_cast<unsigned>(blocks), blocks_across(blocks, s.cols, resident));
    const auto kernel = s.e5m2 ? requantize_kernel<true> : requantize_kernel<false>;
    kernel<<<grid, warps * warp_size, 0, stream_of(stream)>>>(s, x, token_of, counts, to);
    CUDA_CHECK(cudaGetLastError());
}

void requantize_columns(const FilledRows& s, Fp8Rows q, const std::int32_t* counts, Fp8Columns columns, void* stream) {
    if (s.rows <= 0 || s.cols <= 0) return;
    demand_packs("requantize_columns", {q.data, columns.data, columns.scale}, square_pack, s.cols);
    launch(s, q, nullptr, counts, columns, stream);
}

constexpr int inverting_threads = 256;
__global__ void __launch_bounds__(inverting_threads)
    invert_kernel(std::int64_t copies, int top_k, const std::int32_t* row_of, std::int32_t* token_of) {
    const std::int64_t copy = std::int64_t{blockIdx.x} * inverting_threads + threadIdx.x;
    if (copy < copies && row_of[copy] >= 0) token_of[row_of[copy]] = static_cast<std::int32_t>(copy / top_k);
}

void permute_columns(const PermuteShape& p, const FilledRows& s, Fp8Rows tokens, const std::int32_t* row_of,
                     const std::int32_t* counts, std::int32_t* token_of, Fp8Columns columns, void* stream) {
    const std::int64_t copies = p.tokens * p.top_k;
    if (copies <= 0 || s.rows <= 0 || s.cols <= 0) return;
    demand_packs("permute_columns", {tokens.data, columns.data, columns.scale}, square_pack, s.cols);
    invert_kernel<<<blocks_for(copies, inverting_threads), inverting_threads, 0, stream_of(stream)>>>(copies, p.top_k,
                                                                                                      row_of, token_of);
    CUDA_CHECK(cudaGetLastError());
    launch(s, tokens, token_of, counts, columns, stream);
}

} // namespace

void add_requantize_columns(Kernels& table) {
    table.requantize_columns = requantize_columns;
    table.permute_columns = permute_columns;
}

} // namespace moe::cuda
