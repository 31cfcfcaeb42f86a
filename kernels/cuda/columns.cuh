// Sums over rows, column by column, in an order that does not depend on the launch.
#pragma once

#include "kernels/cuda/behind.cuh"
#include "kernels/cuda/vector.cuh"

namespace moe::cuda {

inline constexpr int sum_cols = 32, sum_rows = 32; // shape of a block that sums columns

// out[c] += sum over rows [begin, end) of term(r, c) for the sum_cols columns of blockIdx.x.
template <class Term>
__device__ void sum_columns(const Term& term, float* out, std::int64_t begin, std::int64_t end, std::int64_t cols) {
    __shared__ float part[sum_rows][sum_cols + 1];
    const int lane = static_cast<int>(threadIdx.x % sum_cols), slice = static_cast<int>(threadIdx.x / sum_cols);
    const std::int64_t c = std::int64_t{blockIdx.x} * sum_cols + lane;
    float sum = 0.0f;
    if (c < cols) {
        for (std::int64_t r = begin + slice; r < end; r += sum_rows) sum += term(r, c);
    }
    part[slice][lane] = sum;
    __syncthreads();
    if (slice != 0 || c >= cols || begin >= end) return;
    sum = 0.0f;
    for (int s = 0; s < sum_rows; ++s) sum += part[s][lane];
    out[c] += sum;
}

template <class Term>
__global__ void __launch_bounds__(sum_cols* sum_rows)
    sum_columns_kernel(Term term, float* out, std::int64_t rows, std::int64_t cols) {
    wait_for_last();
    sum_columns(term, out, 0, rows, cols);
}

template <class Term>
void launch_sum_columns(const Term& term, float* out, std::int64_t rows, std::int64_t cols, void* stream) {
    launch_behind(sum_columns_kernel<Term>, dim3(blocks_for(cols, sum_cols)), sum_cols * sum_rows, stream, term, out,
                  rows, cols);
}

// Sums that blocks have left in scratch memory, partial[blocks][cols].
struct PartialTerm {
    const float* partial;
    std::int64_t cols;
    __device__ float operator()(std::int64_t block, std::int64_t c) const { return partial[block * cols + c]; }
};

} // namespace moe::cuda
