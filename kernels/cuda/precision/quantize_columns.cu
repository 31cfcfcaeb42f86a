// Columns of routed rows in E4M3: blocks of 128 rows of a group, transposed, with a scale for each column of a block;
// and the rows beside them.
//
// A block of threads goes through squares of 128 x 128. Each thread has 16 neighbouring elements of some rows; what it
// needs of the others is the largest magnitude of each column, which it finds in its warp and then in shared memory.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/precision/column_scales.cuh"
#include "kernels/cuda/precision/fp8_square.cuh"

namespace moe::cuda {
namespace {

constexpr int passes = scale_block / square_rows; // rows of a thread
constexpr int resident = 2;                       // blocks of a multiprocessor

struct Columns {
    Square square;
    uint4 largest[square_threads / warp_size][scale_block / 8]; // of every warp's rows: two columns in a word
    unsigned inverse[scale_block / 2]; // of the columns' scales, powers of two that BF16 holds: two in a word
};

// The largest magnitudes of a square's columns, as far as this warp has its rows; `word`: those of the thread's rows.
__device__ void put_largest(Columns& shared, Values word) {
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
__device__ void raise(Values& largest, const Values& x) {
#pragma unroll
    for (int i = 0; i < Values::words; ++i) largest.word[i] = larger(largest.word[i], x.word[i]);
}

// Two columns of each of the first 64 threads.
__device__ void put_scales(Columns& shared, const ColumnTarget& target) {
    const int pair = static_cast<int>(threadIdx.x);
    if (pair >= scale_block / 2 || 2 * pair >= target.cols) return;
    shared.inverse[pair] = put_pair(shared.largest, target, pair);
}

// Four values in a byte each, by the inverses of their scales.
__device__ unsigned rounded_bytes(unsigned low, unsigned high, unsigned by_low, unsigned by_high) {
    const unsigned first = times(low, by_low), second = times(high, by_high);
    return four_of<false>(low_half(first), high_half(first), low_half(second), high_half(second));
}

// A row's 16 elements of this thread as `quantize_rows` makes them, 128 columns sharing a scale; q: where they go, with
// the place of the block's scale. A whole warp asks; within: the row is there.
__device__ void put_row(Fp8Rows q, bool within, const Values& x) {
    unsigned largest = largest_of(x);
#pragma unroll
    for (int offset = sharers / 2; offset > 0; offset /= 2)
        largest = max(largest, __shfl_xor_sync(all_lanes, largest, offset));
    if (!within) return;
    const BlockScale block(largest);
    const unsigned by = upper_halves(block.inverse, block.inverse);
    const auto four = [&](int i) { return rounded_bytes(x.word[2 * i], x.word[2 * i + 1], by, by); };
    *reinterpret_cast<uint4*>(q.data) = uint4{four(0), four(1), four(2), four(3)};
    if (threadIdx.x % sharers == 0) *q.scale = block.scale;
}

// Leaves the square's columns at their target; within(p): whether it has the thread's row p. beside() is done while
// others find the scales; behind(), as soon as the values are of no more use. All threads of the block call.
template <class Within, class Beside, class Behind>
__device__ void put_columns(Columns& shared, const Values (&values)[passes], const ColumnTarget& target, Within within,
                            Beside beside, Behind behind) {
    const int pack = static_cast<int>(threadIdx.x) % sharers, top = static_cast<int>(threadIdx.x) / sharers;
    Values largest{};
#pragma unroll
    for (int p = 0; p < passes; ++p) raise(largest, values[p]);
    put_largest(shared, largest);
    __syncthreads();
    put_scales(shared, target);
    beside();
    __syncthreads();
    unsigned word[passes][square_pack / 4];
#pragma unroll
    for (int i = 0; i < square_pack / 4; ++i) {
        const uint2 by = reinterpret_cast<const uint2*>(shared.inverse)[pack * (square_pack / 4) + i];
#pragma unroll
        for (int p = 0; p < passes; ++p)
            word[p][i] = rounded_bytes(values[p].word[2 * i], values[p].word[2 * i + 1], by.x, by.y);
    }
#pragma unroll
    for (int p = 0; p < passes; ++p)
        shared.square.at(p * square_rows + top, pack) =
            within(p) ? uint4{word[p][0], word[p][1], word[p][2], word[p][3]} : uint4{};
    behind();
    __syncthreads();
    put_transposed(shared.square, target.to, scale_block, scale_block, target.cols);
}

// `both`: the rows are quantized, too. The next square is on its way while the present one is written.
template <bool both, class T>
__global__ void __launch_bounds__(square_threads, resident)
    columns_kernel(FilledRows s, const T* x, const std::int32_t* counts, Fp8Rows q, Fp8Columns to) {
    __shared__ Columns shared;
    const std::int64_t index = blockIdx.x;
    const RowBlock block = block_at(counts, s.groups, s.rows, index);
    if (block.rows == 0) return;
    const int cols = static_cast<int>(s.cols), across = ceil_div(cols, static_cast<int>(scale_block)),
              pack = static_cast<int>(threadIdx.x) % sharers, top = static_cast<int>(threadIdx.x) / sharers;
    const auto there = [&](int p) { return p * square_rows + top < block.rows; };
    const T* const first_row = x + (block.first + top) * cols;
    Pack<T, square_pack> raw[passes];
    const auto take = [&](int tile) {
        const int col = tile * scale_block + pack * square_pack;
#pragma unroll
        for (int p = 0; p < passes; ++p)
            raw[p] = col < cols && there(p)
                         ? Access<T, square_pack>::take({first_row + p * square_rows * cols + col, Type::f32}, 0)
                         : Pack<T, square_pack>{};
    };
    const int step = static_cast<int>(gridDim.y), begin = static_cast<int>(blockIdx.y);
    take(begin);
    for (int tile = begin; tile < across; tile += step) {
        const int first = tile * scale_block, col = first + pack * square_pack;
        const auto within = [&](int p) { return there(p) && col < cols; };
        Values values[passes];
#pragma unroll
        for (int p = 0; p < passes; ++p) values[p] = in_bf16(raw[p]);
        const std::int64_t at = index * cols + first;
        put_columns(
            shared, values, ColumnTarget{to.data + at * scale_block, to.scale + at, cols - first}, within,
            [&] {
                if constexpr (both) {
                    const std::int64_t row = block.first + top;
                    const Fp8Rows to_row{q.data + row * cols + col, q.scale + row * across + tile};
#pragma unroll
                    for (int p = 0; p < passes; ++p)
                        put_row({to_row.data + p * square_rows * cols, to_row.scale + p * square_rows * across},
                                within(p), values[p]);
                }
            },
            [&] { take(tile + step); });
    }
}

template <bool both, class T>
void launch(const FilledRows& s, const T* x, const std::int32_t* counts, Fp8Rows q, Fp8Columns to, void* stream) {
    const std::int64_t blocks = column_blocks(s.rows, counts == nullptr ? 1 : s.groups);
    const dim3 grid(static_cast<unsigned>(blocks), blocks_across(blocks, s.cols, resident));
    columns_kernel<both><<<grid, square_threads, 0, stream_of(stream)>>>(s, x, counts, q, to);
    CUDA_CHECK(cudaGetLastError());
}

void quantize_columns(const FilledRows& s, Src x, const std::int32_t* counts, Fp8Rows q, Fp8Columns columns,
                      void* stream) {
    if (s.rows <= 0 || s.cols <= 0) return;
    demand_packs("quantize_columns", {x.data, q.data, columns.data, columns.scale}, square_pack, s.cols);
    with_storage(x.type, [&](auto element) {
        const auto* const rows = static_cast<const decltype(element)*>(x.data);
        q.data == nullptr ? launch<false>(s, rows, counts, q, columns, stream)
                          : launch<true>(s, rows, counts, q, columns, stream);
    });
}

} // namespace

void add_quantize_columns(Kernels& table) { table.quantize_columns = quantize_columns; }

} // namespace moe::cuda
