// Columns of routed rows in E4M3, or of rows in E5M2: blocks of 128 rows of a group, transposed, with a scale for each
// column of a block; of rows as they lie, or of those that are copies of tokens.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/precision/column_square.cuh"

namespace moe::cuda {
namespace {

constexpr int tiles_together = 8; // squares side by side that a block of threads goes through

// Where a thread's elements lie in every row, and the scale of their block.
struct Place {
    int cols, scales; // of a row
    int col, tile;
};

// Sources of a thread's 16 elements, which are BF16 in what follows; of a row it holds its number there.
template <class T>
struct WideRows {
    const T* x;
    static constexpr bool e5m2 = false;
    using Raw = Values;
    __device__ int number(std::int64_t row) const { return static_cast<int>(row); }
    __device__ Raw take(int number, Place at) const { return values_at(x + std::int64_t{number} * at.cols + at.col); }
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
    __device__ int number(std::int64_t row) const { return static_cast<int>(row); }
    __device__ Raw take(int number, Place at) const {
        return {*reinterpret_cast<const uint4*>(q.data + std::int64_t{number} * at.cols + at.col),
                q.scale[std::int64_t{number} * at.scales + at.tile]};
    }
    __device__ static Values widen(const Raw& raw) { return widened<wide>(raw.bytes, raw.scale); }
};
// Rows that are copies of tokens.
template <bool wide>
struct CopiedRows : LowRows<wide> {
    const std::int32_t* token_of;
    __device__ int number(std::int64_t row) const { return token_of[row]; }
};

// `both`: the rows are quantized, too. The next square is on its way while the present one is written.
template <bool both, class Source>
__global__ void __launch_bounds__(square_threads, 2)
    columns_kernel(FilledRows s, Source x, const std::int32_t* counts, Fp8Rows q, Fp8Columns to) {
    __shared__ Columns<square_threads> shared;
    constexpr int passes = Shares<square_threads>::passes, rows = Shares<square_threads>::rows;
    const std::int64_t index = blockIdx.x;
    const RowBlock block = block_at(counts, s.groups, s.rows, index);
    if (block.rows == 0) return;
    const int cols = static_cast<int>(s.cols), across = ceil_div(cols, static_cast<int>(scale_block)),
              pack = static_cast<int>(threadIdx.x) % sharers, top = static_cast<int>(threadIdx.x) / sharers;
    const auto there = [&](int p) { return p * rows + top < block.rows; };
    int number[passes] = {};
#pragma unroll
    for (int p = 0; p < passes; ++p)
        if (there(p)) number[p] = x.number(block.first + p * rows + top);
    typename Source::Raw raw[passes];
    const auto take = [&](int tile) {
        const int col = tile * scale_block + pack * square_pack;
#pragma unroll
        for (int p = 0; p < passes; ++p)
            raw[p] = col < cols && there(p) ? x.take(number[p], {cols, across, col, tile}) : typename Source::Raw{};
    };
    const int step = static_cast<int>(gridDim.y), begin = static_cast<int>(blockIdx.y);
    take(begin);
    for (int tile = begin; tile < across; tile += step) {
        const int first = tile * scale_block, col = first + pack * square_pack;
        const auto within = [&](int p) { return there(p) && col < cols; };
        Values values[passes];
#pragma unroll
        for (int p = 0; p < passes; ++p) values[p] = Source::widen(raw[p]);
        const std::int64_t at = index * cols + first;
        put_columns<Source::e5m2>(
            shared, values, ColumnTarget{to.data + at * scale_block, to.scale + at, cols - first}, within,
            [&] {
                if constexpr (both) {
                    const std::int64_t row = block.first + top;
                    const Fp8Rows to_row{q.data + row * cols + col, q.scale + row * across + tile};
#pragma unroll
                    for (int p = 0; p < passes; ++p)
                        put_row({to_row.data + p * rows * cols, to_row.scale + p * rows * across}, within(p),
                                values[p]);
                }
            },
            [&] { take(tile + step); });
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
    s.e5m2 ? launch<false>(s, CopiedRows<true>{{tokens}, token_of}, counts, {}, columns, stream)
           : launch<false>(s, CopiedRows<false>{{tokens}, token_of}, counts, {}, columns, stream);
}

} // namespace

void add_quantize_columns(Kernels& table) {
    table.quantize_columns = quantize_columns;
    table.requantize_columns = requantize_columns;
    table.permute_columns = permute_columns;
}

} // namespace moe::cuda
