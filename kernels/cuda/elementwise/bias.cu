// Biases per expert, and the column sums that are the gradients of biases.
#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/rows.cuh"
#include "kernels/cuda/scratch.hpp"

namespace moe::cuda {
namespace {

struct BiasTerm {
    Src dy;
    const float* probs;
    std::int64_t cols;
    float share = 1.0f;
    __device__ float operator()(std::int64_t r, std::int64_t c) const {
        return load(dy, r * cols + c) * (probs != nullptr ? share * probs[r] : share);
    }
};

__global__ void __launch_bounds__(sum_cols* sum_rows)
    grouped_sum_kernel(BiasTerm term, const std::int32_t* counts, float* db, std::int64_t capacity) {
    const int e = static_cast<int>(blockIdx.y);
    const Rows rows = rows_of_group(counts, e, capacity);
    sum_columns(term, db + e * term.cols, rows.begin, rows.end, term.cols);
}

// Sums rows [begin, end) of 32 packs of columns, a warp every row_warps-th row, and adds or writes them to out[cols].
template <class A, bool adding>
__device__ void sum_packs(const BiasTerm& term, float* out, std::int64_t begin, std::int64_t end) {
    constexpr int W = A::width, together = 4;
    __shared__ float part[row_warps][warp_size * W];
    const std::int64_t c = (std::int64_t{blockIdx.x} * warp_size + lane_of_warp()) * W;
    const int warp = static_cast<int>(threadIdx.x) / warp_size;
    float sum[W] = {};
    for (std::int64_t first = begin + warp; first < end && c < term.cols; first += row_warps * together) {
        typename A::Held held[together];
#pragma unroll
        for (int t = 0; t < together; ++t) {
            if (first + t * row_warps < end) held[t] = A::take(term.dy, (first + t * row_warps) * term.cols + c);
        }
#pragma unroll
        for (int t = 0; t < together; ++t) {
            const std::int64_t r = first + t * row_warps;
            if (r >= end) break;
            const float p = term.probs != nullptr ? term.share * term.probs[r] : term.share;
#pragma unroll
            for (int j = 0; j < W; ++j) sum[j] += held[t][j] * p;
        }
    }
#pragma unroll
    for (int j = 0; j < W; ++j) part[warp][lane_of_warp() * W + j] = sum[j];
    __syncthreads();
    const std::int64_t start = std::int64_t{blockIdx.x} * warp_size * W;
    for (int i = static_cast<int>(threadIdx.x); i < warp_size * W && start + i < term.cols; i += row_threads) {
        float all = 0.0f;
#pragma unroll
        for (int w = 0; w < row_warps; ++w) all += part[w][i];
        if constexpr (adding) {
            out[start + i] += all;
        } else {
            out[start + i] = all;
        }
    }
}

// partial[gridDim.y][cols]: each block of a column takes an equal run of rows.
template <class A>
__global__ void __launch_bounds__(row_threads) partial_bias_kernel(BiasTerm term, float* partial, std::int64_t rows) {
    const std::int64_t each = (rows + gridDim.y - 1) / gridDim.y, begin = blockIdx.y * each;
    const std::int64_t end = begin + each < rows ? begin + each : rows;
    sum_packs<A, false>(term, partial + blockIdx.y * term.cols, begin, end);
}

template <class A>
__global__ void __launch_bounds__(row_threads)
    grouped_packs_kernel(BiasTerm term, const std::int32_t* counts, float* db, std::int64_t capacity) {
    const int e = static_cast<int>(blockIdx.y);
    const Rows rows = rows_of_group(counts, e, capacity);
    if (rows.begin < rows.end) sum_packs<A, true>(term, db + e * term.cols, rows.begin, rows.end);
}

template <class A>
__global__ void __launch_bounds__(row_threads)
    grouped_bias_kernel(Src x, Src b, const std::int32_t* counts, const float* probs, Dst y, int groups,
                        std::int64_t cols, std::int64_t capacity, float share) {
    constexpr int W = A::width;
    for_each_row(counts, groups, capacity, [&](std::int64_t row) {
        const int e = group_of(counts, groups, row);
        const float p = probs != nullptr ? share * probs[row] : share;
        for_each_pack<4>(
            static_cast<int>(cols / W), [&](int i) { return A::take(x, row * cols + i * W); },
            [&](int i, const typename A::Held& held) {
                float value[W];
                take_small<W>(b, e * cols + i * W, value);
#pragma unroll
                for (int j = 0; j < W; ++j) value[j] = held[j] + value[j] * p;
                A::put(y, row * cols + i * W, value);
            });
    });
}

// dprobs[row] = share * drows . b
template <class A>
__global__ void __launch_bounds__(row_threads)
    bias_prob_kernel(Src drows, const std::int32_t* counts, Src b, float* dprobs, int groups, std::int64_t cols,
                     std::int64_t capacity, float share) {
    constexpr int W = A::width;
    for_each_row(counts, groups, capacity, [&](std::int64_t row) {
        const int e = group_of(counts, groups, row);
        float sum = 0.0f;
        for_each_pack<4>(
            static_cast<int>(cols / W), [&](int i) { return A::take(drows, row * cols + i * W); },
            [&](int i, const typename A::Held& held) {
                float bias[W];
                take_small<W>(b, e * cols + i * W, bias);
#pragma unroll
                for (int j = 0; j < W; ++j) sum += held[j] * bias[j];
            });
        sum = warp_sum(sum);
        if (lane_of_warp() == 0) dprobs[row] = share * sum;
    });
}

void bias_grad(Src dy, float* db, std::int64_t rows, std::int64_t cols, void* stream) {
    if (rows <= 0 || cols <= 0) return;
    const BiasTerm term{dy, nullptr, cols};
    with_access({dy}, {cols}, [&](auto access) {
        using A = decltype(access);
        if constexpr (A::width == 1) {
            launch_sum_columns(term, db, rows, cols, stream);
        } else {
            const unsigned across = blocks_for(cols, A::width * warp_size);
            const std::int64_t room = scratch_floats / cols;
            constexpr std::int64_t blocks = 1024, least_rows = 4 * row_warps;
            std::int64_t splits = ceil_div(blocks, std::int64_t{across});
            if (splits > room) splits = room;
            if (splits > ceil_div(rows, least_rows)) splits = ceil_div(rows, least_rows);
            if (splits < 1) return launch_sum_columns(term, db, rows, cols, stream); // The scratch holds fewer columns.
            float* const partial = scratch_of(stream_of(stream));
            const dim3 grid(across, static_cast<unsigned>(splits));
            partial_bias_kernel<A><<<grid, row_threads, 0, stream_of(stream)>>>(term, partial, rows);
            CUDA_CHECK(cudaGetLastError());
            launch_sum_columns(PartialTerm{partial, cols}, db, splits, cols, stream);
        }
    });
}

void grouped_bias_add(Src rows, Src b, const std::int32_t* counts, const float* probs, Dst y, int groups,
                      std::int64_t cols, std::int64_t capacity, float share, void* stream) {
    if (groups <= 0 || cols <= 0) return;
    with_access({rows, y, Src{b.data, rows.type}}, {cols}, [&](auto access) {
        launch_rows<grouped_bias_kernel<decltype(access)>>(capacity, stream, rows, b, counts, probs, y, groups, cols,
                                                           capacity, share);
    });
}

void grouped_bias_grad(Src drows, const std::int32_t* counts, Src b, const float* probs, float* db, float* dprobs,
                       int groups, std::int64_t cols, std::int64_t capacity, float share, void* stream) {
    if (groups <= 0 || cols <= 0 || capacity <= 0) return;
    const BiasTerm term{drows, probs, cols, share};
    with_access({drows, Src{b.data, drows.type}}, {cols}, [&](auto access) {
        using A = decltype(access);
        if constexpr (A::width == 1) {
            const dim3 grid(blocks_for(cols, sum_cols), static_cast<unsigned>(groups));
            grouped_sum_kernel<<<grid, sum_cols * sum_rows, 0, stream_of(stream)>>>(term, counts, db, capacity);
        } else {
            const dim3 grid(blocks_for(cols, A::width * warp_size), static_cast<unsigned>(groups));
            grouped_packs_kernel<A><<<grid, row_threads, 0, stream_of(stream)>>>(term, counts, db, capacity);
        }
        CUDA_CHECK(cudaGetLastError());
        if (dprobs == nullptr) return;
        launch_rows<bias_prob_kernel<A>>(capacity, stream, drows, counts, b, dprobs, groups, cols, capacity, share);
    });
}

} // namespace

void add_bias(Kernels& table) {
    table.bias_grad = bias_grad;
    table.grouped_bias_add = grouped_bias_add;
    table.grouped_bias_grad = grouped_bias_grad;
}

} // namespace moe::cuda
