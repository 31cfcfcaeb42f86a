// Curves, gates and their slopes as kernels of activations compute them, element by element.
#pragma once

#include "kernels/cuda/device.cuh"

namespace moe::cuda {

inline constexpr float quick = 1.702f; // Hendrycks & Gimpel, arXiv:1606.08415: gelu(x) ~ x sigmoid(1.702 x)

// Exact exponentials and quotients would take longer than the memory; this is within 3e-7 for |x| below 8 and loses a
// further 6e-8 of e^-x for every unit of a smaller x.
__device__ inline float sigmoid(float x) {
    constexpr float log2e = 1.44269504088896341f;
    float power, quotient;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-log2e * x));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(1.0f + power));
    return quotient;
}

struct Point {
    float value, slope;
};
__device__ inline Point evaluate(Curve curve, float x) {
    constexpr float sqrt_half = 0.70710678118654752f, density = 0.39894228040143268f; // 1/sqrt(2), 1/sqrt(2 pi)
    switch (curve) {
    case Curve::gelu: {
        const float gate = 0.5f * (1.0f + erff(x * sqrt_half));
        return {x * gate, gate + x * density * expf(-0.5f * x * x)};
    }
    case Curve::gelu_tanh: {
        constexpr float factor = 0.79788456080286536f, cube = 0.044715f; // sqrt(2 / pi); arXiv:1606.08415
        const float t = tanhf(factor * (x + cube * x * x * x));
        return {0.5f * x * (1.0f + t),
                0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * factor * (1.0f + 3.0f * cube * x * x)};
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

// The curve of the gate and up inside their limits, with the slopes of both; 1 added to up where the gate itself is
// cut.
struct Gated {
    Point curve;
    float up, up_slope = 1.0f;
    __device__ Gated(Curve function, float x, float y, float limit, bool behind) : up(y) {
        curve = evaluate(function, limit > 0.0f && !behind ? fminf(x, limit) : x);
        if (limit <= 0.0f) return;
        if ((behind ? curve.value : x) > limit) curve.slope = 0.0f;
        if (behind) curve.value = fminf(curve.value, limit);
        up_slope = fabsf(up) <= limit ? 1.0f : 0.0f;
        up = fminf(fmaxf(up, -limit), limit) + (behind ? 0.0f : 1.0f);
    }
};

struct Operands {
    Src x;
    const float* probs;
    const std::int32_t* counts;
};

// The kinds that a kernel is compiled for: SwiGLU, which most models have, and all else.
template <bool swiglu>
struct Kind {
    Curve curve;
    bool gated, behind;
    float limit;
    __device__ explicit Kind(const ActivationShape& s)
        : curve(swiglu ? Curve::silu : s.curve),
          gated(swiglu || s.gated),
          behind(!swiglu && s.limit_behind),
          limit(swiglu ? 0.0f : static_cast<float>(s.limit)) {}
};
inline bool is_swiglu(const ActivationShape& s) { return s.gated && s.curve == Curve::silu && s.limit <= 0.0; }

// An element's share of the results of a gradient, of the gradient `grad` of y: y itself again, and its part of dprobs.
struct Slopes {
    float y, along, gate, up;
};
template <bool swiglu>
__device__ Slopes slopes_of(const Kind<swiglu>& kind, float gate, float up, float grad, float p) {
    const Gated at(kind.curve, gate, kind.gated ? up : 1.0f, kind.limit, kind.behind);
    return {at.curve.value * at.up * p, grad * at.curve.value * at.up, grad * at.up * at.curve.slope * p,
            grad * at.curve.value * at.up_slope * p};
}

} // namespace moe::cuda
