// LayerNorm, and the norms of queries and of keys over the heads of all ranks: a block for each row.
#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/elementwise/norm.cuh"
#include "kernels/cuda/families.hpp"

namespace moe::cuda {
namespace {

constexpr int threads = 256;

__global__ void __launch_bounds__(threads) layernorm_kernel(Norm n, Src b, Dst y, float* stat, float eps) {
    const std::int64_t row = blockIdx.x;
    float sum = 0.0f, squares = 0.0f;
    for (std::int64_t c = threadIdx.x; c < n.cols; c += threads) sum += load(n.x, row * n.stride + c);
    const float mean = block_sum(sum) / static_cast<float>(n.cols);
    for (std::int64_t c = threadIdx.x; c < n.cols; c += threads) {
        const float value = load(n.x, row * n.stride + c) - mean;
        squares += value * value;
    }
    const float scale = rsqrtf(block_sum(squares) / static_cast<float>(n.cols) + eps);
    if (threadIdx.x == 0) {
        stat[2 * row] = scale;
        stat[2 * row + 1] = mean;
    }
    for (std::int64_t c = threadIdx.x; c < n.cols; c += threads) {
        const float bias = b.data != nullptr ? load(b, c) : 0.0f;
        store(y, row * n.cols + c, (load(n.x, row * n.stride + c) - mean) * scale * load(n.w, c) + bias);
    }
}

struct LayerGradients {
    Src dy, dresidual;
    const float* stat;
    Dst dx;
};

// Computes, with n = (x - mean) rstd and g = dy w: dx = rstd (g - mean g - n mean(g n)), + dresidual.
__global__ void __launch_bounds__(threads) layernorm_grad_kernel(Norm n, LayerGradients d) {
    const std::int64_t row = blockIdx.x;
    const float scale = d.stat[2 * row], mean = d.stat[2 * row + 1];
    float level = 0.0f, along = 0.0f;
    for (std::int64_t c = threadIdx.x; c < n.cols; c += threads) {
        const float g = load(d.dy, row * n.cols + c) * load(n.w, c);
        level += g;
        along += g * (load(n.x, row * n.stride + c) - mean) * scale;
    }
    level = block_sum(level) / static_cast<float>(n.cols);
    along = block_sum(along) / static_cast<float>(n.cols);
    for (std::int64_t c = threadIdx.x; c < n.cols; c += threads) {
        const float normed = (load(n.x, row * n.stride + c) - mean) * scale;
        float value = (load(d.dy, row * n.cols + c) * load(n.w, c) - level - normed * along) * scale;
        if (d.dresidual.data != nullptr) value += load(d.dresidual, row * n.cols + c);
        store(d.dx, row * n.stride + c, value);
    }
}

struct LayerTerm { // term of dw[c] = sum of dy (x - mean) rstd
    Norm n;
    LayerGradients d;
    __device__ float operator()(std::int64_t r, std::int64_t c) const {
        return load(d.dy, r * n.cols + c) * (load(n.x, r * n.stride + c) - d.stat[2 * r + 1]) * d.stat[2 * r];
    }
};

struct BiasTerm { // term of db[c] = sum of dy
    Src dy;
    std::int64_t cols;
    __device__ float operator()(std::int64_t r, std::int64_t c) const { return load(dy, r * cols + c); }
};

void layernorm(Src x, Src w, Src b, Dst y, float* stat, std::int64_t rows, std::int64_t cols, std::int64_t stride,
               double eps, void* stream) {
    if (rows <= 0 || cols <= 0) return;
    const Norm n{x, w, rows, cols, stride != 0 ? stride : cols};
    layernorm_kernel<<<blocks_for(rows, 1), threads, 0, stream_of(stream)>>>(n, b, y, stat, static_cast<float>(eps));
    CUDA_CHECK(cudaGetLastError());
}

void layernorm_grad(Src dy, Src x, Src w, const float* stat, Src dresidual, Dst dx, float* dw, float* db,
                    std::int64_t rows, std::int64_t cols, std::int64_t stride, void* stream) {
    if (rows <= 0 || cols <= 0) return;
    const Norm n{x, w, rows, cols, stride != 0 ? stride : cols};
    const LayerGradients d{dy, dresidual, stat, dx};
    // The weights' first: dx may be written over dy.
    launch_sum_columns(LayerTerm{n, d}, dw, rows, cols, stream);
    if (db != nullptr) launch_sum_columns(BiasTerm{dy, cols}, db, rows, cols, stream);
    layernorm_grad_kernel<<<blocks_for(rows, 1), threads, 0, stream_of(stream)>>>(n, d);
    CUDA_CHECK(cudaGetLastError());
}

// The columns of queries, 0, or of keys, 1, of a row.
struct Part {
    std::int64_t from, cols, all;
    __device__ Part(const HeadsNormShape& s, int i)
        : from(i == 0 ? 0 : s.queries), cols(i == 0 ? s.queries : s.keys), all(i == 0 ? s.all_queries : s.all_keys) {}
};
__device__ float rstd_of(const HeadsNormShape& s, const Part& part, float squares) {
    return rsqrtf(squares / static_cast<float>(part.all) + static_cast<float>(s.eps));
}

// sums[row, part] of x^2, or of dy w x where dy is given; blockIdx.y: the part.
__global__ void __launch_bounds__(threads)
    heads_sums_kernel(HeadsNormShape s, Src dy, Src x, Src wq, Src wk, float* sums) {
    const std::int64_t row = blockIdx.x;
    const int i = static_cast<int>(blockIdx.y);
    const Part part(s, i);
    const Src w = i == 0 ? wq : wk;
    float sum = 0.0f;
    for (std::int64_t c = threadIdx.x; c < part.cols; c += threads) {
        const std::int64_t at = row * s.width + part.from + c;
        const float value = load(x, at);
        sum += dy.data != nullptr ? load(dy, at) * load(w, c) * value : value * value;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[2 * row + i] = i == 0 ? sum : s.key_share * sum;
}

__global__ void __launch_bounds__(threads)
    heads_norm_kernel(HeadsNormShape s, Src x, const float* squares, Src wq, Src wk, Dst y) {
    const std::int64_t row = blockIdx.x;
    for (int i = 0; i < 2; ++i) {
        const Part part(s, i);
        const float scale = rstd_of(s, part, squares[2 * row + i]);
        for (std::int64_t c = threadIdx.x; c < part.cols; c += threads) {
            const std::int64_t at = row * s.width + part.from + c;
            store(y, at, load(x, at) * scale * load(i == 0 ? wq : wk, c));
        }
    }
    if (x.data == y.data) return;
    const std::int64_t rest = s.queries + s.keys, at = row * s.width + rest;
    copy_row(x, at, y, at, s.width - rest, static_cast<int>(threadIdx.x), threads);
}

struct HeadsGradients {
    Src dy, x;
    const float *squares, *along;
    Src wq, wk;
};

__global__ void __launch_bounds__(threads) heads_norm_grad_kernel(HeadsNormShape s, HeadsGradients g, Dst dx) {
    const std::int64_t row = blockIdx.x;
    for (int i = 0; i < 2; ++i) {
        const Part part(s, i);
        const float scale = rstd_of(s, part, g.squares[2 * row + i]);
        const float back = g.along[2 * row + i] * scale * scale * scale / static_cast<float>(part.all);
        for (std::int64_t c = threadIdx.x; c < part.cols; c += threads) {
            const std::int64_t at = row * s.width + part.from + c;
            store(dx, at, load(g.dy, at) * load(i == 0 ? g.wq : g.wk, c) * scale - load(g.x, at) * back);
        }
    }
    if (g.dy.data == dx.data) return;
    const std::int64_t rest = s.queries + s.keys, at = row * s.width + rest;
    copy_row(g.dy, at, dx, at, s.width - rest, static_cast<int>(threadIdx.x), threads);
}

struct HeadsTerm { // term of dw[c] = sum of dy x rstd
    HeadsNormShape s;
    HeadsGradients g;
    int part;
    __device__ float operator()(std::int64_t r, std::int64_t c) const {
        const Part of(s, part);
        const std::int64_t at = r * s.width + of.from + c;
        return load(g.dy, at) * load(g.x, at) * rstd_of(s, of, g.squares[2 * r + part]);
    }
};

void heads_along(const HeadsNormShape& s, Src dy, Src x, Src wq, Src wk, float* along, void* stream) {
    if (s.tokens <= 0) return;
    const dim3 grid(blocks_for(s.tokens, 1), 2);
    heads_sums_kernel<<<grid, threads, 0, stream_of(stream)>>>(s, dy, x, wq, wk, along);
    CUDA_CHECK(cudaGetLastError());
}

void heads_squares(const HeadsNormShape& s, Src x, float* squares, void* stream) {
    heads_along(s, {}, x, {}, {}, squares, stream);
}

void heads_norm(const HeadsNormShape& s, Src x, const float* squares, Src wq, Src wk, Dst y, void* stream) {
    if (s.tokens <= 0) return;
    heads_norm_kernel<<<blocks_for(s.tokens, 1), threads, 0, stream_of(stream)>>>(s, x, squares, wq, wk, y);
    CUDA_CHECK(cudaGetLastError());
}

void heads_norm_grad(const HeadsNormShape& s, Src dy, Src x, const float* squares, const float* along, Src wq, Src wk,
                     Dst dx, float* dwq, float* dwk, void* stream) {
    if (s.tokens <= 0) return;
    const HeadsGradients g{dy, x, squares, along, wq, wk};
    // The weights' first: dx may be written over dy.
    launch_sum_columns(HeadsTerm{s, g, 0}, dwq, s.tokens, s.queries, stream);
    launch_sum_columns(HeadsTerm{s, g, 1}, dwk, s.tokens, s.keys, stream);
    heads_norm_grad_kernel<<<blocks_for(s.tokens, 1), threads, 0, stream_of(stream)>>>(s, g, dx);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_layer_norm(Kernels& table) {
    table.layernorm = layernorm;
    table.layernorm_grad = layernorm_grad;
    table.heads_squares = heads_squares;
    table.heads_norm = heads_norm;
    table.heads_along = heads_along;
    table.heads_norm_grad = heads_norm_grad;
}

} // namespace moe::cuda
