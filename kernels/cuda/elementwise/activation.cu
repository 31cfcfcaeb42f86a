// Gated and plain activations with the routing probability, forward and backward.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/precision/fp8.cuh"

namespace moe::cuda {
namespace {

constexpr float quick = 1.702f; // Hendrycks & Gimpel, arXiv:1606.08415: gelu(x) ~ x sigmoid(1.702 x)

// Exact exponentials and quotients would take longer than the memory; this is within 3e-7 for |x| below 8 and loses a
// further 6e-8 of e^-x for every unit of a smaller x.
__device__ float sigmoid(float x) {
    constexpr float log2e = 1.44269504088896341f;
    float power, quotient;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-log2e * x));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(1.0f + power));
    return quotient;
}

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
bool is_swiglu(const ActivationShape& s) { return s.gated && s.curve == Curve::silu && s.limit <= 0.0; }

// The results of a kernel besides dprobs: y, dx and E4M3 of its main result, each of them only where it is asked for.
struct Results {
    Dst y, dx;
    Fp8Rows q;
    float* dprobs = nullptr;
};

// A warp waits for the counts, for its row and for its block's largest in turn: what hides that is other warps, so that
// registers are kept to what four or three blocks of a multiprocessor can have.
//
// `more`: results beyond the one that every call has. Values that become E4M3 are rounded to BF16 first.
template <class A, bool swiglu, bool more>
__global__ void __launch_bounds__(row_threads, 4) activation_kernel(ActivationShape s, Operands in, Results out) {
    constexpr int W = A::width;
    const Kind<swiglu> kind(s);
    struct Both {
        typename A::Held gate, up;
    };
    for_each_row(in.counts, s.groups, s.rows, [&](std::int64_t row) {
        const float p = in.probs != nullptr ? in.probs[row] : 1.0f;
        const std::int64_t start = row * (kind.gated ? 2 * s.ffn : s.ffn);
        for_packs_of_warp<3>(
            static_cast<int>(s.ffn / W),
            [&](int i) {
                Both held;
                held.gate = A::take(in.x, start + i * W);
                if (kind.gated) held.up = A::take(in.x, start + s.ffn + i * W);
                return held;
            },
            [&](int i, const Both& held, bool within) {
                float value[W];
#pragma unroll
                for (int j = 0; j < W; ++j) {
                    const Gated at(kind.curve, held.gate[j], kind.gated ? held.up[j] : 1.0f, kind.limit, kind.behind);
                    value[j] = at.curve.value * at.up * p;
                }
                if (within && (!more || out.y.data != nullptr)) A::put(out.y, row * s.ffn + i * W, value);
                if constexpr (more) {
                    put_quantized(out.q, row, s.ffn, i, within, Access<__nv_bfloat16, W>::pack(value));
                }
            });
    });
}

template <class A, bool swiglu, bool more>
__global__ void __launch_bounds__(row_threads, 3)
    activation_grad_kernel(ActivationShape s, Operands in, Src dy, Results out) {
    constexpr int W = A::width;
    const Kind<swiglu> kind(s);
    struct All {
        typename A::Held gate, up, dy;
    };
    const std::int64_t width = kind.gated ? 2 * s.ffn : s.ffn;
    const int packs = static_cast<int>(s.ffn / W);
    for_each_row(in.counts, s.groups, s.rows, [&](std::int64_t row) {
        const float p = in.probs != nullptr ? in.probs[row] : 1.0f;
        float along = 0.0f;
        const auto put = [&](int pack, bool within, float(&value)[W]) {
            if (within) A::put(out.dx, row * width + pack * W, value);
            if constexpr (more) {
                if (out.q.data == nullptr) return;
                put_quantized(out.q, row, width, pack, within, Access<__nv_bfloat16, W>::pack(value));
            }
        };
        for_packs_of_warp<3>( // Both inputs are read before both outputs are written, as dx may be x.
            packs,
            [&](int i) {
                All held;
                held.gate = A::take(in.x, row * width + i * W);
                if (kind.gated) held.up = A::take(in.x, row * width + s.ffn + i * W);
                held.dy = A::take(dy, row * s.ffn + i * W);
                return held;
            },
            [&](int i, const All& held, bool within) {
                float value[W], dgate[W], dup[W];
#pragma unroll
                for (int j = 0; j < W; ++j) {
                    const Gated at(kind.curve, held.gate[j], kind.gated ? held.up[j] : 1.0f, kind.limit, kind.behind);
                    const float grad = held.dy[j];
                    value[j] = at.curve.value * at.up * p;
                    if (within) along += grad * at.curve.value * at.up;
                    dgate[j] = grad * at.up * at.curve.slope * p;
                    dup[j] = grad * at.curve.value * at.up_slope * p;
                }
                if (more && within && out.y.data != nullptr) A::put(out.y, row * s.ffn + i * W, value);
                put(i, within, dgate);
                if (kind.gated) put(packs + i, within, dup);
            });
        if (out.dprobs == nullptr) return;
        along = warp_sum(along);
        if (lane_of_warp() == 0) out.dprobs[row] = along;
    });
}

// Calls run(access, swiglu, more) with what a call needs compiled in; `more` takes packs of 16 bytes of one type.
template <class Run>
void with_kind(const char* name, const ActivationShape& s, std::initializer_list<Src> operands, bool more, Run run) {
    const auto with_more = [&](auto access, auto with) {
        if (is_swiglu(s)) {
            run(access, std::true_type{}, with);
        } else {
            run(access, std::false_type{}, with);
        }
    };
    if (!more) return with_access(operands, {s.ffn}, [&](auto access) { with_more(access, std::false_type{}); });
    const Type type = operands.begin()->type;
    if (!whole_packs(type, operands, {s.ffn}))
        throw std::runtime_error(std::string(name) +
                                 ": operands to quantize are not of one type in whole packs of 16 bytes");
    with_storage(type,
                 [&](auto element) { with_more(Access<decltype(element), 16 / sizeof(element)>{}, std::true_type{}); });
}

void activation(const ActivationShape& s, Src x, const float* probs, const std::int32_t* counts, Dst y, Fp8Rows q,
                void* stream) {
    const Operands in{x, probs, counts};
    with_kind("activation", s, {x, y}, q.data != nullptr, [&](auto access, auto swiglu, auto more) {
        launch_rows<activation_kernel<decltype(access), swiglu(), more()>>(s.rows, stream, s, in, Results{y, {}, q});
    });
}

void activation_grad(const ActivationShape& s, Src dy, Src x, const float* probs, const std::int32_t* counts, Dst dx,
                     float* dprobs, Dst y, Fp8Rows q, void* stream) {
    const Operands in{x, probs, counts};
    const bool more = y.data != nullptr || q.data != nullptr;
    with_kind("activation_grad", s, {x, dy, dx, y}, more, [&](auto access, auto swiglu, auto further) {
        launch_rows<activation_grad_kernel<decltype(access), swiglu(), further()>>(s.rows, stream, s, in, dy,
                                                                                   Results{y, dx, q, dprobs});
    });
}

} // namespace

void add_activation(Kernels& table) {
    table.activation = activation;
    table.activation_grad = activation_grad;
}

} // namespace moe::cuda
