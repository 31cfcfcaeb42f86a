// Products and triangular systems of matrices in shared memory, by all threads of a block.
#pragma once

#include "kernels/cuda/device.cuh"

namespace moe::cuda::delta {

inline constexpr int threads = 256, rows = static_cast<int>(delta_chunk), widest = 128; // columns of a head at most

__host__ __device__ inline int padded(int columns) { return (columns + 3) / 4 * 4; }
// Elements from row to row in shared memory: rows of 16 bytes, apart in their banks.
__host__ __device__ inline int stride_of(int columns) { return padded(columns) + 4; }

__device__ inline unsigned tf32(float x) {
    unsigned rounded;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(x));
    return rounded;
}

// A warp has pieces of 16 * down rows and 8 * across columns.
template <bool ta, bool tb, int down, int across, class Use>
__device__ void tensor_product(int m, int n, int k, const float* a, int lda, const float* b, int ldb, Use use) {
    const int lane = static_cast<int>(threadIdx.x % warp_size), warp = static_cast<int>(threadIdx.x) / warp_size;
    const int row = lane / 4, col = lane % 4, pieces = n / (8 * across);
    for (int piece = warp; piece < m / (16 * down) * pieces; piece += threads / warp_size) {
        const int i = piece / pieces * 16 * down + row, j = piece % pieces * 8 * across;
        float sum[down][across][4] = {};
#pragma unroll 2
        for (int l = col; l < k; l += 8) {
            unsigned x[down][4], y[across][2];
#pragma unroll
            for (int u = 0; u < down; ++u)
#pragma unroll
                for (int v = 0; v < 4; ++v) {
                    const int at = i + u * 16 + v % 2 * 8, in = l + v / 2 * 4;
                    x[u][v] = tf32(ta ? a[in * lda + at] : a[at * lda + in]);
                }
#pragma unroll
            for (int u = 0; u < across; ++u)
#pragma unroll
                for (int v = 0; v < 2; ++v) {
                    const int at = j + u * 8 + row, in = l + v * 4;
                    y[u][v] = tf32(tb ? b[at * ldb + in] : b[in * ldb + at]);
                }
#pragma unroll
            for (int u = 0; u < down; ++u)
#pragma unroll
                for (int v = 0; v < across; ++v)
                    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                        "{%8, %9}, {%0, %1, %2, %3};"
                        : "+f"(sum[u][v][0]), "+f"(sum[u][v][1]), "+f"(sum[u][v][2]), "+f"(sum[u][v][3])
                        : "r"(x[u][0]), "r"(x[u][1]), "r"(x[u][2]), "r"(x[u][3]), "r"(y[v][0]), "r"(y[v][1]));
        }
#pragma unroll
        for (int u = 0; u < down; ++u)
#pragma unroll
            for (int v = 0; v < across; ++v)
#pragma unroll
                for (int w = 0; w < 4; ++w) use(i + u * 16 + w / 2 * 8, j + v * 8 + col * 2 + w % 2, sum[u][v][w]);
    }
}

template <bool ta, bool tb, class Use>
__device__ void plain_product(int m, int n, int k, const float* a, int lda, const float* b, int ldb, Use use) {
    const int across = n / 4;
    for (int tile = static_cast<int>(threadIdx.x); tile < m / 4 * across; tile += threads) {
        const int i = tile / across * 4, j = tile % across * 4;
        float sum[4][4] = {};
        for (int l = 0; l < k; ++l) {
            float x[4], y[4];
            if (ta) {
                const float4 v = *reinterpret_cast<const float4*>(a + l * lda + i);
                x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
            } else {
#pragma unroll
                for (int u = 0; u < 4; ++u) x[u] = a[(i + u) * lda + l];
            }
            if (tb) {
#pragma unroll
                for (int u = 0; u < 4; ++u) y[u] = b[(j + u) * ldb + l];
            } else {
                const float4 v = *reinterpret_cast<const float4*>(b + l * ldb + j);
                y[0] = v.x, y[1] = v.y, y[2] = v.z, y[3] = v.w;
            }
#pragma unroll
            for (int u = 0; u < 4; ++u)
#pragma unroll
                for (int v = 0; v < 4; ++v) sum[u][v] = fmaf(x[u], y[v], sum[u][v]);
        }
#pragma unroll
        for (int u = 0; u < 4; ++u)
#pragma unroll
            for (int v = 0; v < 4; ++v) use(i + u, j + v, sum[u][v]);
    }
}

// use(i, j, sum over l < k of op(A)(i, l) op(B)(l, j)) for i < m, j < n: A is stored [m, k], or [k, m] where ta; B
// [k, n], or [n, k] where tb. All are multiples of 4, on the tensor cores of 16. The same thread has the same (i, j) of
// the same m and n.
template <bool tensor, bool ta, bool tb, class Use>
__device__ void product(int m, int n, int k, const float* a, int lda, const float* b, int ldb, Use use) {
    if constexpr (!tensor) {
        plain_product<ta, tb>(m, n, k, a, lda, b, ldb, use);
    } else if (m * n >= 8192 && m % 32 == 0 && n % 32 == 0) { // as many pieces as warps, or more
        tensor_product<ta, tb, 2, 4>(m, n, k, a, lda, b, ldb, use);
    } else if (m * n >= 4096 && m % 32 == 0) {
        tensor_product<ta, tb, 2, 2>(m, n, k, a, lda, b, ldb, use);
    } else {
        tensor_product<ta, tb, 1, 2>(m, n, k, a, lda, b, ldb, use);
    }
}

// x <- (I + A)^-1 x, or (I + A^T)^-1 x, for the strictly lower A [rows, rows]: 16 rows at a time, a thread for each
// column of x and of y.
template <bool transposed>
__device__ void solve(const float* a, int lda, float* x, int x_columns, float* y, int y_columns) {
    constexpr int block = 16;
    const int xw = padded(x_columns), yw = padded(y_columns), t = static_cast<int>(threadIdx.x);
    float* const column = t < xw ? x + t : y + (t - xw);
    const int stride = t < xw ? stride_of(x_columns) : stride_of(y_columns);
    for (int step = 0; step < rows / block; ++step) {
        const int from = transposed ? rows - (step + 1) * block : step * block;
        if (t < xw + yw) {
            float value[block];
            for (int u = 0; u < block; ++u) value[u] = column[(from + u) * stride];
            const int others = transposed ? from + block : 0, end = transposed ? rows : from;
            for (int l = others; l < end; ++l) {
                const float known = column[l * stride];
#pragma unroll
                for (int u = 0; u < block; ++u)
                    value[u] -= (transposed ? a[l * lda + from + u] : a[(from + u) * lda + l]) * known;
            }
#pragma unroll
            for (int step_in = 0; step_in < block; ++step_in) {
                const int u = transposed ? block - 1 - step_in : step_in;
#pragma unroll
                for (int w = 0; w < block; ++w)
                    if (transposed ? w < u : w > u)
                        value[w] -=
                            (transposed ? a[(from + u) * lda + from + w] : a[(from + w) * lda + from + u]) * value[u];
            }
            for (int u = 0; u < block; ++u) column[(from + u) * stride] = value[u];
        }
    }
}

} // namespace moe::cuda::delta
