// RMSNorm: rows of whole packs stay in registers and are read once, others are read twice.
#include "kernels/cuda/elementwise/norm.cuh"

#include "kernels/cuda/families.hpp"
#include "kernels/cuda/rows.cuh"

namespace moe::cuda {
namespace {

constexpr int threads = 256;

__global__ void __launch_bounds__(threads) rmsnorm_kernel(Norm n, Dst y, float* rstd, float eps) {
    const std::int64_t row = blockIdx.x;
    float squares = 0.0f;
    for (std::int64_t c = threadIdx.x; c < n.cols; c += threads) {
        const float value = load(n.x, row * n.stride + c);
        squares += value * value;
    }
    const float scale = rsqrtf(block_sum(squares) / static_cast<float>(n.cols) + eps);
    if (threadIdx.x == 0) rstd[row] = scale;
    for (std::int64_t c = threadIdx.x; c < n.cols; c += threads) {
        store(y, row * n.cols + c, load(n.x, row * n.stride + c) * scale * load(n.w, c));
    }
}

// A block steps through rows, K packs of each in every thread; the next row is on its way while this one is summed.
template <class A, int K>
__global__ void __launch_bounds__(norm_threads) rmsnorm_rows_kernel(Norm n, Dst y, float* rstd, float eps) {
    constexpr int W = A::width;
    const int packs = static_cast<int>(n.cols / W);
    typename A::Held weight[K];
    for_own_packs<A, K>(packs, [&](int k, int c) { weight[k] = A::take(n.w, c); });
    Share<A, K> next;
    next.read(n.x, blockIdx.x * n.stride, packs);
    __shared__ RowSums sums;
    const float share = 1.0f / static_cast<float>(n.cols);
    int parity = 0;
    for (std::int64_t row = blockIdx.x; row < n.rows; row += gridDim.x, parity ^= 1) {
        const Share<A, K> x = next;
        if (row + gridDim.x < n.rows) next.read(n.x, (row + gridDim.x) * n.stride, packs);
        float squares = 0.0f;
        for_own_packs<A, K>(packs, [&](int k, int) {
#pragma unroll
            for (int j = 0; j < W; ++j) squares += x.held[k][j] * x.held[k][j];
        });
        const float scale = rsqrtf(sums(squares, parity) * share + eps);
        if (threadIdx.x == 0) rstd[row] = scale;
        for_own_packs<A, K>(packs, [&](int k, int c) {
            float value[W];
#pragma unroll
            for (int j = 0; j < W; ++j) value[j] = x.held[k][j] * scale * weight[k][j];
            A::put(y, row * n.cols + c, value);
        });
    }
}

// A warp per row, P packs in every lane: no barrier, and the rows at work lie side by side in memory.
template <class A, int P>
__global__ void __launch_bounds__(row_threads) rmsnorm_lanes_kernel(Norm n, Dst y, float* rstd, float eps) {
    constexpr int W = A::width;
    const int packs = static_cast<int>(n.cols / W), lane = lane_of_warp();
    for_each_row(nullptr, 0, n.rows, [&](std::int64_t row) {
        typename A::Held x[P];
#pragma unroll
        for (int p = 0; p < P; ++p) {
            if (lane + p * warp_size < packs) x[p] = A::take(n.x, row * n.stride + (lane + p * warp_size) * W);
        }
        float squares = 0.0f;
#pragma unroll
        for (int p = 0; p < P; ++p) {
            if (lane + p * warp_size >= packs) break;
#pragma unroll
            for (int j = 0; j < W; ++j) squares += x[p][j] * x[p][j];
        }
        const float scale = rsqrtf(warp_sum(squares) / static_cast<float>(n.cols) + eps);
        if (lane == 0) rstd[row] = scale;
#pragma unroll
        for (int p = 0; p < P; ++p) {
            const int c = (lane + p * warp_size) * W;
            if (lane + p * warp_size >= packs) break;
            const typename A::Held weight = A::take(n.w, c);
            float value[W];
#pragma unroll
            for (int j = 0; j < W; ++j) value[j] = x[p][j] * scale * weight[j];
            A::put(y, row * n.cols + c, value);
        }
    });
}

void rmsnorm(Src x, Src w, Dst y, float* rstd, std::int64_t rows, std::int64_t cols, std::int64_t stride, double eps,
             void* stream) {
    if (rows <= 0 || cols <= 0) return;
    const Norm n{x, w, rows, cols, stride != 0 ? stride : cols};
    const auto small = static_cast<float>(eps);
    bool done = false;
    with_access({x, y, w}, {cols, n.stride}, [&](auto access) {
        using A = decltype(access);
        if constexpr (A::width > 1) {
            constexpr int most = 16; // packs of a lane; with half of them a block per row is as fast
            if (cols / A::width > most / 2 * warp_size && cols / A::width <= most * warp_size) {
                done = true;
                return launch_rows<rmsnorm_lanes_kernel<A, most>>(rows, stream, n, y, rstd, small);
            }
            done = with_share(cols / A::width, [&](auto share, int block) {
                constexpr auto kernel = rmsnorm_rows_kernel<A, share()>;
                kernel<<<resident_blocks<kernel>(block, rows, 1), block, 0, stream_of(stream)>>>(n, y, rstd, small);
            });
        }
    });
    if (!done) rmsnorm_kernel<<<blocks_for(rows, 1), threads, 0, stream_of(stream)>>>(n, y, rstd, small);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_norm(Kernels& table) {
    table.rmsnorm = rmsnorm;
    table.rmsnorm_grad = rmsnorm_grad;
}

} // namespace moe::cuda
