// Gated and plain activations with the routing probability, rows times the routing probability, and the sigmoid gate of
// a shared expert.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/families.hpp"

namespace moe::cuda {
namespace {

constexpr int threads = 256;
constexpr float quick = 1.702f; // Hendrycks & Gimpel, arXiv:1606.08415: gelu(x) ~ x sigmoid(1.702 x)

__device__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

struct Point {
    float value, slope;
};
__device__ Point evaluate(Curve curve, float x) {
    constexpr float sqrt_half = 0.70710678118654752f, density = 0.39894228040143268f; // 1/sqrt(2), 1/sqrt(2 pi)
    switch (curve) {
    case Curve::gelu: {
        const float gate = 0.5f * (1.0f + erff(x * sqrt_half));
        return {x * gate, gate + x * density * expf(-0.5f * x * x)};
    }
    case Curve::relu2: {
        const float y = fmaxf(x, 0.0f);
        return {y * y, 2.0f * y};
    }
    default: {
        const float slope = curve == Curve::silu ? 1.0f : quick, gate = sigmoid(slope * x);
        return {x * gate, gate * (1.0f + slope * x * (1.0f - gate))};
    }
    }
}

// What multiplies the curve, and the slopes of gate and up inside their limits; 1 added to up where there is a limit.
struct Gated {
    float gate, up, gate_slope = 1.0f, up_slope = 1.0f;
    __device__ Gated(const ActivationShape& s, float x, float y) : gate(x), up(y) {
        const auto limit = static_cast<float>(s.limit);
        if (limit <= 0.0f) return;
        gate_slope = gate <= limit ? 1.0f : 0.0f;
        up_slope = fabsf(up) <= limit ? 1.0f : 0.0f;
        gate = fminf(gate, limit);
        up = fminf(fmaxf(up, -limit), limit) + 1.0f;
    }
};

// Whether this block's row holds data; all threads of a block get the same answer.
__device__ bool active(const std::int32_t* counts, int groups, std::int64_t rows, std::int64_t row) {
    return counts == nullptr || row < routed_rows(counts, groups, rows);
}

__global__ void __launch_bounds__(threads)
    activation_kernel(ActivationShape s, Src x, const float* probs, const std::int32_t* counts, Dst y) {
    const std::int64_t row = blockIdx.x, start = row * (s.gated ? 2 * s.ffn : s.ffn);
    if (!active(counts, s.groups, s.rows, row)) return;
    const float p = probs != nullptr ? probs[row] : 1.0f;
    for (std::int64_t i = threadIdx.x; i < s.ffn; i += threads) {
        const Gated at(s, load(x, start + i), s.gated ? load(x, start + s.ffn + i) : 1.0f);
        store(y, row * s.ffn + i, evaluate(s.curve, at.gate).value * at.up * p);
    }
}

__global__ void __launch_bounds__(threads) activation_grad_kernel(ActivationShape s, Src dy, Src x, const float* probs,
                                                                  const std::int32_t* counts, Dst dx, float* dprobs) {
    const std::int64_t row = blockIdx.x, start = row * (s.gated ? 2 * s.ffn : s.ffn);
    if (!active(counts, s.groups, s.rows, row)) return;
    const float p = probs != nullptr ? probs[row] : 1.0f;
    float along = 0.0f;
    for (std::int64_t i = threadIdx.x; i < s.ffn; i += threads) { // both inputs before both outputs: dx may be x
        const Gated at(s, load(x, start + i), s.gated ? load(x, start + s.ffn + i) : 1.0f);
        const Point curve = evaluate(s.curve, at.gate);
        const float grad = load(dy, row * s.ffn + i);
        along += grad * curve.value * at.up;
        store(dx, start + i, grad * at.up * curve.slope * at.gate_slope * p);
        if (s.gated) store(dx, start + s.ffn + i, grad * curve.value * at.up_slope * p);
    }
    if (dprobs == nullptr) return;
    along = block_sum(along);
    if (threadIdx.x == 0) dprobs[row] = along;
}

__global__ void __launch_bounds__(threads) sigmoid_kernel(Src y, Src g, Dst out, std::int64_t cols) {
    const std::int64_t row = blockIdx.x;
    const float gate = sigmoid(load(g, row));
    for (std::int64_t c = threadIdx.x; c < cols; c += threads) {
        store(out, row * cols + c, load(y, row * cols + c) * gate);
    }
}

__global__ void __launch_bounds__(threads)
    sigmoid_grad_kernel(Src dout, Src y, Src g, Dst dy, Dst dg, std::int64_t cols) {
    const std::int64_t row = blockIdx.x;
    const float gate = sigmoid(load(g, row));
    float along = 0.0f;
    for (std::int64_t c = threadIdx.x; c < cols; c += threads) {
        const float grad = load(dout, row * cols + c);
        along += grad * load(y, row * cols + c);
        store(dy, row * cols + c, grad * gate);
    }
    along = block_sum(along);
    if (threadIdx.x == 0) store(dg, row, along * gate * (1.0f - gate));
}

__global__ void __launch_bounds__(threads) scale_rows_kernel(Src y, const float* p, const std::int32_t* counts, Dst out,
                                                             int groups, std::int64_t rows, std::int64_t cols) {
    const std::int64_t row = blockIdx.x;
    if (!active(counts, groups, rows, row)) return;
    for (std::int64_t c = threadIdx.x; c < cols; c += threads) {
        store(out, row * cols + c, load(y, row * cols + c) * p[row]);
    }
}

__global__ void __launch_bounds__(threads)
    scale_rows_grad_kernel(Src dout, Src y, const float* p, const std::int32_t* counts, Dst dy, float* dp, int groups,
                           std::int64_t rows, std::int64_t cols) {
    const std::int64_t row = blockIdx.x;
    if (!active(counts, groups, rows, row)) return;
    float along = 0.0f;
    for (std::int64_t c = threadIdx.x; c < cols; c += threads) {
        const float grad = load(dout, row * cols + c);
        along += grad * load(y, row * cols + c);
        store(dy, row * cols + c, grad * p[row]);
    }
    along = block_sum(along);
    if (threadIdx.x == 0) dp[row] = along;
}

void activation(const ActivationShape& s, Src x, const float* probs, const std::int32_t* counts, Dst y, void* stream) {
    if (s.rows <= 0) return;
    activation_kernel<<<blocks_for(s.rows, 1), threads, 0, stream_of(stream)>>>(s, x, probs, counts, y);
    CUDA_CHECK(cudaGetLastError());
}

void activation_grad(const ActivationShape& s, Src dy, Src x, const float* probs, const std::int32_t* counts, Dst dx,
                     float* dprobs, void* stream) {
    if (s.rows <= 0) return;
    activation_grad_kernel<<<blocks_for(s.rows, 1), threads, 0, stream_of(stream)>>>(s, dy, x, probs, counts, dx,
                                                                                     dprobs);
    CUDA_CHECK(cudaGetLastError());
}

void sigmoid_scale(Src y, Src g, Dst out, std::int64_t rows, std::int64_t cols, void* stream) {
    if (rows <= 0) return;
    sigmoid_kernel<<<blocks_for(rows, 1), threads, 0, stream_of(stream)>>>(y, g, out, cols);
    CUDA_CHECK(cudaGetLastError());
}

void sigmoid_scale_grad(Src dout, Src y, Src g, Dst dy, Dst dg, std::int64_t rows, std::int64_t cols, void* stream) {
    if (rows <= 0) return;
    sigmoid_grad_kernel<<<blocks_for(rows, 1), threads, 0, stream_of(stream)>>>(dout, y, g, dy, dg, cols);
    CUDA_CHECK(cudaGetLastError());
}

void scale_rows(Src y, const float* p, const std::int32_t* counts, Dst out, int groups, std::int64_t rows,
                std::int64_t cols, void* stream) {
    if (rows <= 0) return;
    scale_rows_kernel<<<blocks_for(rows, 1), threads, 0, stream_of(stream)>>>(y, p, counts, out, groups, rows, cols);
    CUDA_CHECK(cudaGetLastError());
}

void scale_rows_grad(Src dout, Src y, const float* p, const std::int32_t* counts, Dst dy, float* dp, int groups,
                     std::int64_t rows, std::int64_t cols, void* stream) {
    if (rows <= 0) return;
    scale_rows_grad_kernel<<<blocks_for(rows, 1), threads, 0, stream_of(stream)>>>(dout, y, p, counts, dy, dp, groups,
                                                                                   rows, cols);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_activation(Kernels& table) {
    table.activation = activation;
    table.activation_grad = activation_grad;
    table.sigmoid_scale = sigmoid_scale;
    table.sigmoid_scale_grad = sigmoid_scale_grad;
    table.scale_rows = scale_rows;
    table.scale_rows_grad = scale_rows_grad;
}

} // namespace moe::cuda
