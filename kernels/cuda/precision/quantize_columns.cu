// Columns of routed rows in E4M3, or of rows in E5M2: blocks of 128 rows of a group, transposed, with a scale for each
// column of a block.
//
// A block of threads holds 128 rows x 128 columns. Each thread has 16 neighbouring elements of four rows; what it needs
// of the others is the largest magnitude of each column, which it finds in its warp and then in shared memory.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/precision/fp8_square.cuh"
#include "kernels/cuda/precision/row_blocks.cuh"

#include <type_traits>

namespace moe::cuda {
namespace {

constexpr int passes = scale_block / square_rows;
constexpr int tiles_together = 4; // squares side by side that a block of threads computes
constexpr int words = Values::words;

// The rows of block `index`; a whole warp asks at once.
__device__ RowBlock block_at(const FilledRows& s, const std::int32_t* counts, std::int64_t index) {
    return counts == nullptr ? block_of_runs<scale_block>(s.rows, s.rows, index)
                             : block_of_groups<scale_block>(counts, s.groups, s.rows, index);
}

// Sources of a thread's 16 elements, which are BF16 in what follows.
template <class T>
struct WideRows {
    const T* x;
    static constexpr bool e5m2 = false;
    using Raw = Values;
    __device__ Raw take(std::int64_t row, std::int64_t cols, std::int64_t col) const {
        return values_at(x + row * cols + col);
    }
    __device__ static Values widen(const Raw& raw) { return raw; }
};
template <bool wide>
struct LowRows {
    Fp8Rows q;
    static constexpr bool e5m2 = wide;
    struct Raw {
        uint4 bytes{};
        float scale = 0.0f;
    };
    __device__ Raw take(std::int64_t row, std::int64_t cols, std::int64_t col) const {
        return {*reinterpret_cast<const uint4*>(q.data + row * cols + col),
                q.scale[row * ceil_div(cols, std::int64_t{scale_block}) + col / scale_block]};
    }
    __device__ static Values widen(const Raw& raw) {
        const unsigned word[] = {raw.bytes.x, raw.bytes.y, raw.bytes.z, raw.bytes.w};
        float value[square_pack];
#pragma unroll
        for (int i = 0; i < 4; ++i) widen_four<wide>(word[i], raw.scale, value + 4 * i);
        return Access<__nv_bfloat16, square_pack>::pack(value);
    }
};

struct Columns {
    Square square;
    uint4 largest[square_threads / warp_size][scale_block / 8]; // of every warp's rows: two columns in a word
    float inverse[scale_block];
};

// The largest magnitudes of the square's columns, as far as this warp has its rows.
__device__ void put_largest(Columns& shared, const Values (&values)[passes]) {
    unsigned word[words];
#pragma unroll
    for (int i = 0; i < words; ++i) {
        word[i] = 0;
#pragma unroll
        for (int p = 0; p < passes; ++p) word[i] = __vmaxu2(word[i], values[p].word[i] & 0x7fff7fffu);
#pragma unroll
        for (int offset = sharers; offset < warp_size; offset *= 2)
            word[i] = __vmaxu2(word[i], __shfl_xor_sync(all_lanes, word[i], offset));
    }
    const int lane = lane_of_warp();
    if (lane >= sharers) return;
#pragma unroll
    for (int i = 0; i < words / 4; ++i)
        shared.largest[threadIdx.x / warp_size][lane * (words / 4) + i] =
            uint4{word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]};
}

// Two columns of each of the first 64 threads.
template <bool e5m2>
__device__ void put_scales(Columns& shared, float* scale, int cols) {
    const int pair = static_cast<int>(threadIdx.x);
    if (pair >= scale_block / 2 || 2 * pair >= cols) return;
    unsigned both = 0;
#pragma unroll
    for (const auto& of_warp : shared.largest) both = __vmaxu2(both, reinterpret_cast<const unsigned*>(of_warp)[pair]);
    const auto scale_of = [](unsigned largest) { return e5m2 ? e5m2_block(largest) : BlockScale(largest); };
    const BlockScale low = scale_of(both << 16), high = scale_of(both & 0xffff0000u);
    *reinterpret_cast<float2*>(scale + 2 * pair) = float2{low.scale, high.scale};
    *reinterpret_cast<float2*>(shared.inverse + 2 * pair) = float2{low.inverse, high.inverse};
}

template <bool e5m2>
__device__ uint4 rounded_by_columns(const Values& x, const float (&inverse)[square_pack]) {
    constexpr auto kind = e5m2 ? __NV_E5M2 : __NV_E4M3;
    unsigned word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        word[i] = 0;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int j = 4 * i + 2 * half;
            const float2 two{x[j] * inverse[j], x[j + 1] * inverse[j + 1]};
            word[i] |= static_cast<unsigned>(__nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, kind)) << 16 * half;
        }
    }
    return {word[0], word[1], word[2], word[3]};
}

// The thread's part of the block of rows' scales is that of `quantize_rows`: 128 columns of a row.
__device__ void put_row(Fp8Rows q, std::int64_t row, std::int64_t cols, std::int64_t col, bool within,
                        const Values& x) {
    unsigned largest = largest_of(x);
#pragma unroll
    for (int offset = sharers / 2; offset > 0; offset /= 2)
        largest = max(largest, __shfl_xor_sync(all_lanes, largest, offset));
    if (!within) return;
    const BlockScale block(largest);
    *reinterpret_cast<uint4*>(q.data + row * cols + col) = rounded(x, block.inverse);
    if (col % scale_block == 0)
        q.scale[row * ceil_div(cols, std::int64_t{scale_block}) + col / scale_block] = block.scale;
}

// Where two blocks of threads are all that a multiprocessor holds, or a square has few bytes, the next square is on its
// way while the present one is computed.
template <bool both, class Source>
constexpr bool reads_ahead = both || !std::is_same_v<typename Source::Raw, Values>;

// `both`: the rows are quantized, too.
template <bool both, class Source>
__global__ void __launch_bounds__(square_threads, reads_ahead<both, Source> ? 2 : 3)
    columns_kernel(FilledRows s, Source x, const std::int32_t* counts, Fp8Rows q, Fp8Columns to) {
    __shared__ Columns shared;
    const std::int64_t index = blockIdx.x, across = ceil_div(s.cols, std::int64_t{scale_block});
    const RowBlock block = block_at(s, counts, index);
    if (block.rows == 0) return;
    const int pack = static_cast<int>(threadIdx.x) % sharers, top = static_cast<int>(threadIdx.x) / sharers;
    typename Source::Raw raw[passes];
    const auto take = [&](std::int64_t col) {
#pragma unroll
        for (int p = 0; p < passes; ++p) {
            const bool within = p * square_rows + top < block.rows && col < s.cols;
            raw[p] = within ? x.take(block.first + p * square_rows + top, s.cols, col) : typename Source::Raw{};
        }
    };
    for (std::int64_t tile = blockIdx.y; tile < across; tile += gridDim.y) {
        const std::int64_t first_col = tile * scale_block, col = first_col + pack * square_pack;
        const int cols = static_cast<int>(min(std::int64_t{scale_block}, s.cols - first_col));
        const auto within = [&](int p) { return p * square_rows + top < block.rows && col < s.cols; };
        if (!reads_ahead<both, Source> || tile == blockIdx.y) take(col);
        Values values[passes];
#pragma unroll
        for (int p = 0; p < passes; ++p) values[p] = Source::widen(raw[p]);
        if constexpr (reads_ahead<both, Source>) take(col + gridDim.y * scale_block);
        put_largest(shared, values);
        __syncthreads();
        put_scales<Source::e5m2>(shared, to.scale + index * s.cols + first_col, cols);
        if constexpr (both) {
#pragma unroll
            for (int p = 0; p < passes; ++p)
                put_row(q, block.first + p * square_rows + top, s.cols, col, within(p), values[p]);
        }
        __syncthreads();
        float inverse[square_pack];
#pragma unroll
        for (int i = 0; i < square_pack / 4; ++i) {
            const float4 four = reinterpret_cast<const float4*>(shared.inverse)[pack * (square_pack / 4) + i];
            inverse[4 * i] = four.x, inverse[4 * i + 1] = four.y, inverse[4 * i + 2] = four.z;
            inverse[4 * i + 3] = four.w;
        }
#pragma unroll
        for (int p = 0; p < passes; ++p)
            shared.square.at(p * square_rows + top, pack) =
                within(p) ? rounded_by_columns<Source::e5m2>(values[p], inverse) : uint4{};
        __syncthreads();
        put_transposed(shared.square, to.data + (index * s.cols + first_col) * scale_block, scale_block, scale_block,
                       cols);
    }
}

template <bool both, class Source>
void launch(const FilledRows& s, const Source& x, const std::int32_t* counts, Fp8Rows q, Fp8Columns to, void* stream) {
    const dim3 grid(static_cast<unsigned>(column_blocks(s.rows, counts == nullptr ? 1 : s.groups)),
                    blocks_for(s.cols, std::int64_t{scale_block} * tiles_together));
    columns_kernel<both><<<grid, square_threads, 0, stream_of(stream)>>>(s, x, counts, q, to);
    CUDA_CHECK(cudaGetLastError());
}

void quantize_columns(const FilledRows& s, Src x, const std::int32_t* counts, Fp8Rows q, Fp8Columns columns,
                      void* stream) {
    if (s.rows <= 0 || s.cols <= 0) return;
    demand_packs("quantize_columns", {x.data, q.data, columns.data, columns.scale}, square_pack, s.cols);
    with_storage(x.type, [&](auto element) {
        const WideRows<decltype(element)> source{static_cast<const decltype(element)*>(x.data)};
        q.data == nullptr ? launch<false>(s, source, counts, q, columns, stream)
                          : launch<true>(s, source, counts, q, columns, stream);
    });
}

void requantize_columns(const FilledRows& s, Fp8Rows q, const std::int32_t* counts, Fp8Columns columns, void* stream) {
    if (s.rows <= 0 || s.cols <= 0) return;
    demand_packs("requantize_columns", {q.data, columns.data, columns.scale}, square_pack, s.cols);
    s.e5m2 ? launch<false>(s, LowRows<true>{q}, counts, {}, columns, stream)
           : launch<false>(s, LowRows<false>{q}, counts, {}, columns, stream);
}

} // namespace

void add_quantize_columns(Kernels& table) {
    table.quantize_columns = quantize_columns;
    table.requantize_columns = requantize_columns;
}

} // namespace moe::cuda
