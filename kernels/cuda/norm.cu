// RMSNorm, biases per expert, and the column sums that are the gradients of weights and biases.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/families.hpp"

namespace moe::cuda {
namespace {

constexpr int threads = 256;
constexpr int row_warps = threads / warp_size;
constexpr int sum_cols = 32, sum_rows = 32; // shape of a block that sums columns

__global__ void __launch_bounds__(threads)
    rmsnorm_kernel(Src x, Src w, Dst y, float* rstd, std::int64_t cols, std::int64_t stride, float eps) {
    const std::int64_t row = blockIdx.x;
    float squares = 0.0f;
    for (std::int64_t c = threadIdx.x; c < cols; c += threads) {
        const float value = load(x, row * stride + c);
        squares += value * value;
    }
    const float scale = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(cols) + eps);
    if (threadIdx.x == 0) rstd[row] = scale;
    for (std::int64_t c = threadIdx.x; c < cols; c += threads) {
        store(y, row * cols + c, load(x, row * stride + c) * scale * load(w, c));
    }
}

// With n = x rstd and g = dy w: dx = rstd (g - n mean(g n)), + dresidual.
__global__ void __launch_bounds__(threads) rmsnorm_grad_kernel(Src dy, Src x, Src w, const float* rstd, Src dresidual,
                                                               Dst dx, std::int64_t cols, std::int64_t stride) {
    const std::int64_t row = blockIdx.x;
    const float scale = rstd[row];
    float along = 0.0f;
    for (std::int64_t c = threadIdx.x; c < cols; c += threads) {
        along += load(dy, row * cols + c) * load(w, c) * load(x, row * stride + c);
    }
    along = block_sum(along) * scale * scale * scale / static_cast<float>(cols);
    for (std::int64_t c = threadIdx.x; c < cols; c += threads) {
        float value = load(dy, row * cols + c) * load(w, c) * scale - load(x, row * stride + c) * along;
        if (dresidual.data != nullptr) value += load(dresidual, row * cols + c);
        store(dx, row * stride + c, value);
    }
}

struct NormTerm { // dw[c] = sum of dy x rstd
    Src dy, x;
    const float* rstd;
    std::int64_t cols, stride;
    __device__ float operator()(std::int64_t r, std::int64_t c) const {
        return load(dy, r * cols + c) * load(x, r * stride + c) * rstd[r];
    }
};
struct BiasTerm {
    Src dy;
    const float* probs;
    std::int64_t cols;
    float share = 1.0f;
    __device__ float operator()(std::int64_t r, std::int64_t c) const {
        return load(dy, r * cols + c) * (probs != nullptr ? share * probs[r] : share);
    }
};

// out[c] += sum over rows [begin, end) of term(r, c), in an order that does not depend on the launch.
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
    sum_columns(term, out, 0, rows, cols);
}

__global__ void __launch_bounds__(sum_cols* sum_rows)
    grouped_sum_kernel(BiasTerm term, const std::int32_t* counts, float* db, std::int64_t cols, std::int64_t capacity) {
    const int e = static_cast<int>(blockIdx.y);
    const Rows rows = rows_of_group(counts, e, capacity);
    sum_columns(term, db + e * cols, rows.begin, rows.end, cols);
}

__global__ void __launch_bounds__(threads)
    grouped_bias_kernel(Src x, Src b, const std::int32_t* counts, const float* probs, Dst y, int groups,
                        std::int64_t cols, std::int64_t capacity, float share) {
    const std::int64_t row = std::int64_t{blockIdx.x} * row_warps + threadIdx.x / warp_size;
    const int e = row < capacity ? group_of(counts, groups, row) : -1;
    if (e < 0) return;
    const float p = probs != nullptr ? share * probs[row] : share;
    for (std::int64_t c = threadIdx.x % warp_size; c < cols; c += warp_size) {
        store(y, row * cols + c, load(x, row * cols + c) + load(b, e * cols + c) * p);
    }
}

// dprobs[row] = share * drows . b
__global__ void __launch_bounds__(threads)
    bias_prob_kernel(Src drows, const std::int32_t* counts, Src b, float* dprobs, int groups, std::int64_t cols,
                     std::int64_t capacity, float share) {
    const std::int64_t row = std::int64_t{blockIdx.x} * row_warps + threadIdx.x / warp_size;
    const int e = row < capacity ? group_of(counts, groups, row) : -1;
    if (e < 0) return;
    float sum = 0.0f;
    for (std::int64_t c = threadIdx.x % warp_size; c < cols; c += warp_size) {
        sum += load(drows, row * cols + c) * load(b, e * cols + c);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % warp_size == 0) dprobs[row] = share * sum;
}

void rmsnorm(Src x, Src w, Dst y, float* rstd, std::int64_t rows, std::int64_t cols, std::int64_t stride, double eps,
             void* stream) {
    if (rows <= 0 || cols <= 0) return;
    rmsnorm_kernel<<<blocks_for(rows, 1), threads, 0, stream_of(stream)>>>(
        x, w, y, rstd, cols, stride != 0 ? stride : cols, static_cast<float>(eps));
    CUDA_CHECK(cudaGetLastError());
}

void rmsnorm_grad(Src dy, Src x, Src w, const float* rstd, Src dresidual, Dst dx, float* dw, std::int64_t rows,
                  std::int64_t cols, std::int64_t stride, void* stream) {
    if (rows <= 0 || cols <= 0) return;
    if (stride == 0) stride = cols;
    // dw first: dx may be written over dy.
    sum_columns_kernel<<<blocks_for(cols, sum_cols), sum_cols * sum_rows, 0, stream_of(stream)>>>(
        NormTerm{dy, x, rstd, cols, stride}, dw, rows, cols);
    CUDA_CHECK(cudaGetLastError());
    rmsnorm_grad_kernel<<<blocks_for(rows, 1), threads, 0, stream_of(stream)>>>(dy, x, w, rstd, dresidual, dx, cols,
                                                                                stride);
    CUDA_CHECK(cudaGetLastError());
}

void bias_grad(Src dy, float* db, std::int64_t rows, std::int64_t cols, void* stream) {
    if (rows <= 0 || cols <= 0) return;
    sum_columns_kernel<<<blocks_for(cols, sum_cols), sum_cols * sum_rows, 0, stream_of(stream)>>>(
        BiasTerm{dy, nullptr, cols}, db, rows, cols);
    CUDA_CHECK(cudaGetLastError());
}

void grouped_bias_add(Src rows, Src b, const std::int32_t* counts, const float* probs, Dst y, int groups,
                      std::int64_t cols, std::int64_t capacity, float share, void* stream) {
    if (groups <= 0 || cols <= 0 || capacity <= 0) return;
    grouped_bias_kernel<<<blocks_for(capacity, row_warps), threads, 0, stream_of(stream)>>>(
        rows, b, counts, probs, y, groups, cols, capacity, share);
    CUDA_CHECK(cudaGetLastError());
}

void grouped_bias_grad(Src drows, const std::int32_t* counts, Src b, const float* probs, float* db, float* dprobs,
                       int groups, std::int64_t cols, std::int64_t capacity, float share, void* stream) {
    if (groups <= 0 || cols <= 0 || capacity <= 0) return;
    const dim3 grid(blocks_for(cols, sum_cols), static_cast<unsigned>(groups));
    grouped_sum_kernel<<<grid, sum_cols * sum_rows, 0, stream_of(stream)>>>(BiasTerm{drows, probs, cols, share}, counts,
                                                                            db, cols, capacity);
    CUDA_CHECK(cudaGetLastError());
    if (dprobs == nullptr) return;
    bias_prob_kernel<<<blocks_for(capacity, row_warps), threads, 0, stream_of(stream)>>>(drows, counts, b, dprobs,
                                                                                         groups, cols, capacity, share);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_norm(Kernels& table) {
    table.rmsnorm = rmsnorm;
    table.rmsnorm_grad = rmsnorm_grad;
    table.bias_grad = bias_grad;
    table.grouped_bias_add = grouped_bias_add;
    table.grouped_bias_grad = grouped_bias_grad;
}

} // namespace moe::cuda
