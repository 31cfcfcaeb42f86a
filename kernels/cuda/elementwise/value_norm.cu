// Norms of value heads without weights (Gemma 4): a warp for each head, whose columns are read twice, the second time
// from the cache. Floors: x in and y out; dy and x in and dx out.
#include "kernels/cuda/families.hpp"

#include "kernels/cuda/rows.cuh"

namespace moe::cuda {
namespace {

constexpr int threads = 256, warps = threads / warp_size;

// The shape as kernels read it.
struct Rows {
    std::int64_t tokens, front, width, x_width, source; // columns; source: where the values begin in x
    int heads, dim;
    float eps;
    bool from_keys;

    __host__ explicit Rows(const ValueNormShape& s)
        : tokens(s.tokens),
          front(s.front),
          width(s.width()),
          x_width(s.x_width()),
          source(s.source()),
          heads(s.heads),
          dim(s.dim),
          eps(static_cast<float>(s.eps)),
          from_keys(s.from_keys) {}
};

// A row's work: its front, copied by all warps, then head by head.
__global__ void __launch_bounds__(threads) value_norm_kernel(Rows s, Src x, Dst y) {
    const int warp = static_cast<int>(threadIdx.x) / warp_size;
    for (std::int64_t t = blockIdx.x; t < s.tokens; t += gridDim.x) {
        const std::int64_t in = t * s.x_width, out = t * s.width;
        for (std::int64_t c = threadIdx.x; c < s.front; c += threads) store(y, out + c, load(x, in + c));
        for (int h = warp; h < s.heads; h += warps) {
            const std::int64_t from = in + s.source + std::int64_t{h} * s.dim,
                               to = out + s.front + std::int64_t{h} * s.dim;
            float squares = 0.0f;
            for (int c = lane_of_warp(); c < s.dim; c += warp_size) squares += load(x, from + c) * load(x, from + c);
            const float rstd = rsqrtf(warp_sum(squares) / static_cast<float>(s.dim) + s.eps);
            for (int c = lane_of_warp(); c < s.dim; c += warp_size) store(y, to + c, load(x, from + c) * rstd);
        }
    }
}

__global__ void __launch_bounds__(threads) value_norm_grad_kernel(Rows s, Src dy, Src x, Dst dx) {
    const int warp = static_cast<int>(threadIdx.x) / warp_size;
    const std::int64_t copied = s.from_keys ? s.source : s.front;
    for (std::int64_t t = blockIdx.x; t < s.tokens; t += gridDim.x) {
        const std::int64_t in = t * s.x_width, out = t * s.width;
        for (std::int64_t c = threadIdx.x; c < copied; c += threads) store(dx, in + c, load(dy, out + c));
        for (int h = warp; h < s.heads; h += warps) {
            const std::int64_t at = s.source + std::int64_t{h} * s.dim, from = in + at,
                               of = out + s.front + std::int64_t{h} * s.dim;
            float squares = 0.0f, along = 0.0f;
            for (int c = lane_of_warp(); c < s.dim; c += warp_size) {
                const float value = load(x, from + c);
                squares += value * value;
                along += value * load(dy, of + c);
            }
            const auto n = static_cast<float>(s.dim);
            const float rstd = rsqrtf(warp_sum(squares) / n + s.eps);
            along = warp_sum(along) * rstd * rstd * rstd / n;
            for (int c = lane_of_warp(); c < s.dim; c += warp_size) {
                const float key = s.from_keys ? load(dy, out + at + c) : 0.0f;
                store(dx, from + c, key + load(dy, of + c) * rstd - load(x, from + c) * along);
            }
        }
    }
}

void value_norm(const ValueNormShape& s, Src x, Dst y, void* stream) {
    if (s.tokens <= 0) return;
    value_norm_kernel<<<blocks_for(s.tokens, 1), threads, 0, stream_of(stream)>>>(Rows(s), x, y);
    CUDA_CHECK(cudaGetLastError());
}

void value_norm_grad(const ValueNormShape& s, Src dy, Src x, Dst dx, void* stream) {
    if (s.tokens <= 0) return;
    value_norm_grad_kernel<<<blocks_for(s.tokens, 1), threads, 0, stream_of(stream)>>>(Rows(s), dy, x, dx);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_value_norm(Kernels& table) {
    table.value_norm = value_norm;
    table.value_norm_grad = value_norm_grad;
}

} // namespace moe::cuda
