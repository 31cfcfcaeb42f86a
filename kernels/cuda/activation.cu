// Gated and plain activations with the routing probability, forward and backward.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/rows.cuh"

namespace moe::cuda {
namespace {

constexpr float quick = 1.702f; // Hendrycks & Gimpel, arXiv:1606.08415: gelu(x) ~ x sigmoid(1.702 x)

__device__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

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
    __device__ Gated(float x, float y, float limit) : gate(x), up(y) {
        if (limit <= 0.0f) return;
        gate_slope = gate <= limit ? 1.0f : 0.0f;
        up_slope = fabsf(up) <= limit ? 1.0f : 0.0f;
        gate = fminf(gate, limit);
        up = fminf(fmaxf(up, -limit), limit) + 1.0f;
    }
};

struct Operands {
    Src x;
    const float* probs;
    const std::int32_t* counts;
};

// What a kernel is compiled for: SwiGLU, which most models have, and all else.
template <bool swiglu>
struct Kind {
    Curve curve;
    bool gated;
    float limit;
    __device__ explicit Kind(const ActivationShape& s)
        : curve(swiglu ? Curve::silu : s.curve),
          gated(swiglu || s.gated),
          limit(swiglu ? 0.0f : static_cast<float>(s.limit)) {}
};
bool is_swiglu(const ActivationShape& s) { return s.gated && s.curve == Curve::silu && s.limit <= 0.0; }

template <class A, bool swiglu>
__global__ void __launch_bounds__(row_threads) activation_kernel(ActivationShape s, Operands in, Dst y) {
    constexpr int W = A::width;
    const Kind<swiglu> kind(s);
    struct Both {
        typename A::Held gate, up;
    };
    for_each_row(in.counts, s.groups, s.rows, [&](std::int64_t row) {
        const float p = in.probs != nullptr ? in.probs[row] : 1.0f;
        const std::int64_t start = row * (kind.gated ? 2 * s.ffn : s.ffn);
        for_each_pack<4>(
            static_cast<int>(s.ffn / W),
            [&](int i) {
                Both held;
                held.gate = A::take(in.x, start + i * W);
                if (kind.gated) held.up = A::take(in.x, start + s.ffn + i * W);
                return held;
            },
            [&](int i, const Both& held) {
                float value[W];
#pragma unroll
                for (int j = 0; j < W; ++j) {
                    const Gated at(held.gate[j], kind.gated ? held.up[j] : 1.0f, kind.limit);
                    value[j] = evaluate(kind.curve, at.gate).value * at.up * p;
                }
                A::put(y, row * s.ffn + i * W, value);
            });
    });
}

template <class A, bool swiglu>
__global__ void __launch_bounds__(row_threads)
    activation_grad_kernel(ActivationShape s, Operands in, Src dy, Dst dx, float* dprobs) {
    constexpr int W = A::width;
    const Kind<swiglu> kind(s);
    struct All {
        typename A::Held gate, up, dy;
    };
    for_each_row(in.counts, s.groups, s.rows, [&](std::int64_t row) {
        const float p = in.probs != nullptr ? in.probs[row] : 1.0f;
        const std::int64_t start = row * (kind.gated ? 2 * s.ffn : s.ffn);
        float along = 0.0f;
        for_each_pack<3>( // both inputs before both outputs: dx may be x
            static_cast<int>(s.ffn / W),
            [&](int i) {
                All held;
                held.gate = A::take(in.x, start + i * W);
                if (kind.gated) held.up = A::take(in.x, start + s.ffn + i * W);
                held.dy = A::take(dy, row * s.ffn + i * W);
                return held;
            },
            [&](int i, const All& held) {
                float dgate[W], dup[W];
#pragma unroll
                for (int j = 0; j < W; ++j) {
                    const Gated at(held.gate[j], kind.gated ? held.up[j] : 1.0f, kind.limit);
                    const Point curve = evaluate(kind.curve, at.gate);
                    const float grad = held.dy[j];
                    along += grad * curve.value * at.up;
                    dgate[j] = grad * at.up * curve.slope * at.gate_slope * p;
                    dup[j] = grad * curve.value * at.up_slope * p;
                }
                A::put(dx, start + i * W, dgate);
                if (kind.gated) A::put(dx, start + s.ffn + i * W, dup);
            });
        if (dprobs == nullptr) return;
        along = warp_sum(along);
        if (lane_of_warp() == 0) dprobs[row] = along;
    });
}

void activation(const ActivationShape& s, Src x, const float* probs, const std::int32_t* counts, Dst y, void* stream) {
    const Operands in{x, probs, counts};
    with_access({x, y}, {s.ffn}, [&](auto access) {
        using A = decltype(access);
        if (is_swiglu(s)) {
            launch_rows<activation_kernel<A, true>>(s.rows, stream, s, in, y);
        } else {
            launch_rows<activation_kernel<A, false>>(s.rows, stream, s, in, y);
        }
    });
}

void activation_grad(const ActivationShape& s, Src dy, Src x, const float* probs, const std::int32_t* counts, Dst dx,
                     float* dprobs, void* stream) {
    const Operands in{x, probs, counts};
    with_access({x, dy, dx}, {s.ffn}, [&](auto access) {
        using A = decltype(access);
        if (is_swiglu(s)) {
            launch_rows<activation_grad_kernel<A, true>>(s.rows, stream, s, in, dy, dx, dprobs);
        } else {
            launch_rows<activation_grad_kernel<A, false>>(s.rows, stream, s, in, dy, dx, dprobs);
        }
    });
}

} // namespace

void add_activation(Kernels& table) {
    table.activation = activation;
    table.activation_grad = activation_grad;
}

} // namespace moe::cuda
