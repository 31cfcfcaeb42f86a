// Gated and plain activations with the routing probability, rows times the routing probability, and the sigmoid gate of
// a shared expert.
#include "kernels/cpu/rows.hpp"

#include <Eigen/Core>

#include <cmath>
#include <numbers>

namespace moe::cpu {
namespace {

using In = Eigen::Map<const Eigen::ArrayXf>;
using Out = Eigen::Map<Eigen::ArrayXf>;

constexpr float quick = 1.702f; // Hendrycks & Gimpel, arXiv:1606.08415: gelu(x) ~ x sigmoid(1.702 x)

constexpr float tanh_factor = 0.7978845608028654f, tanh_cube = 0.044715f; // sqrt(2 / pi); arXiv:1606.08415

float gelu_gate(float x) { return 0.5f * (1.0f + std::erf(x * static_cast<float>(1.0 / std::numbers::sqrt2))); }
float gelu_density(float x) {
    return std::exp(-0.5f * x * x) * static_cast<float>(std::numbers::inv_sqrtpi / std::numbers::sqrt2);
}
float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// y = curve(x) and, where d is given, d = curve'(x).
void evaluate(Curve curve, const float* from, std::int64_t n, float* y, float* d) {
    const In x(from, n);
    switch (curve) {
    case Curve::silu:
    case Curve::quick_gelu: {
        const float slope = curve == Curve::silu ? 1.0f : quick;
        Out gate(y, n);
        gate = 1.0f / (1.0f + (x * -slope).exp());
        if (d != nullptr) Out(d, n) = gate * (1.0f + slope * x * (1.0f - gate));
        gate *= x;
        return;
    }
    case Curve::gelu:
        for (std::int64_t i = 0; i < n; ++i) {
            const float gate = gelu_gate(from[i]);
            y[i] = from[i] * gate;
            if (d != nullptr) d[i] = gate + from[i] * gelu_density(from[i]);
        }
        return;
    case Curve::gelu_tanh:
        for (std::int64_t i = 0; i < n; ++i) {
            const float v = from[i], inner = tanh_factor * (v + tanh_cube * v * v * v), t = std::tanh(inner);
            y[i] = 0.5f * v * (1.0f + t);
            if (d != nullptr)
                d[i] = 0.5f * (1.0f + t) + 0.5f * v * (1.0f - t * t) * tanh_factor * (1.0f + 3.0f * tanh_cube * v * v);
        }
        return;
    case Curve::relu2:
        Out(y, n) = x.max(0.0f).square();
        if (d != nullptr) Out(d, n) = 2.0f * x.max(0.0f);
        return;
    }
}

// Cuts the gate or, behind, its curve from above and up on both sides, and shifts up, where the shape has a limit;
// works in place.
void clamp_gate(const ActivationShape& s, float* gate, std::int64_t n) {
    if (s.limit > 0.0 && !s.limit_behind) Out(gate, n) = In(gate, n).min(static_cast<float>(s.limit));
}
void clamp_curve(const ActivationShape& s, float* curve, std::int64_t n) {
    if (s.limit > 0.0 && s.limit_behind) Out(curve, n) = In(curve, n).min(static_cast<float>(s.limit));
}
void clamp_up(const ActivationShape& s, float* up, std::int64_t n) {
    const auto limit = static_cast<float>(s.limit);
    if (s.limit > 0.0) Out(up, n) = In(up, n).max(-limit).min(limit) + (s.limit_behind ? 0.0f : 1.0f);
}

std::int64_t active_rows(const ActivationShape& s, const std::int32_t* counts) {
    return counts != nullptr ? routed_rows(counts, s.groups, s.rows) : s.rows;
}

// Columns [col, col + n) of row r, of `cols`: kept where an output is there for them. `values` may be the output
// itself.
void keep(const float* values, std::int64_t n, Dst y, Fp8Rows q, std::int64_t r, std::int64_t col, std::int64_t cols) {
    if (y.data != nullptr) store(y, r * cols + col, n, values);
    if (q.data == nullptr) return;
    float* rounded = scratch(Slot::h, chunk);
    std::copy_n(values, n, rounded);
    quantize_part(rounded, n, q, r * cols + col, r * scale_blocks(cols) + col / scale_block);
}

void activation(const ActivationShape& s, Src x, const float* probs, const std::int32_t* counts, Dst y, Fp8Rows q,
                void*) {
    const std::int64_t rows = active_rows(s, counts), width = s.gated ? 2 * s.ffn : s.ffn;
    float* wide_x = scratch(Slot::a, chunk);
    float* wide_up = scratch(Slot::b, chunk);
    float* curve = scratch(Slot::c, chunk);
    float* wide_y = scratch(Slot::d, chunk);
    for (std::int64_t r = 0; r < rows; ++r) {
        const float p = probs != nullptr ? probs[r] : 1.0f;
        for (std::int64_t i = 0; i < s.ffn; i += chunk) {
            const std::int64_t n = std::min(chunk, s.ffn - i);
            const float* gate = read(x, r * width + i, n, wide_x);
            if (s.limit > 0.0) {
                load(x, r * width + i, n, wide_x);
                clamp_gate(s, wide_x, n);
                gate = wide_x;
            }
            evaluate(s.curve, gate, n, curve, nullptr);
            clamp_curve(s, curve, n);
            float* out = y.data != nullptr ? target(y, r * s.ffn + i, wide_y) : wide_y;
            if (s.gated && s.limit > 0.0) {
                load(x, r * width + s.ffn + i, n, wide_up);
                clamp_up(s, wide_up, n);
                Out(out, n) = In(curve, n) * In(wide_up, n) * p;
            } else if (s.gated) {
                Out(out, n) = In(curve, n) * In(read(x, r * width + s.ffn + i, n, wide_up), n) * p;
            } else {
                Out(out, n) = In(curve, n) * p;
            }
            keep(out, n, y, q, r, i, s.ffn);
        }
    }
}

void activation_grad(const ActivationShape& s, Src dy, Src x, const float* probs, const std::int32_t* counts, Dst dx,
                     float* dprobs, Dst y, Fp8Rows q, void*) {
    const std::int64_t rows = active_rows(s, counts), width = s.gated ? 2 * s.ffn : s.ffn;
    float* wide_x = scratch(Slot::a, chunk);
    float* up = scratch(Slot::b, chunk);
    float* curve = scratch(Slot::c, chunk);
    float* slope = scratch(Slot::d, chunk);
    float* grad = scratch(Slot::e, chunk);
    float* wide_dx = scratch(Slot::f, chunk);
    float* wide_y = scratch(Slot::i, chunk);
    float* inside = scratch(Slot::g, chunk); // 1 where up is within its limits
    const auto limit = static_cast<float>(s.limit);
    for (std::int64_t r = 0; r < rows; ++r) {
        const float p = probs != nullptr ? probs[r] : 1.0f;
        float along = 0.0f;
        for (std::int64_t i = 0; i < s.ffn; i += chunk) {
            const std::int64_t n = std::min(chunk, s.ffn - i), gate_at = r * width + i, up_at = gate_at + s.ffn;
            if (s.limit > 0.0) {
                load(x, gate_at, n, inside);
                load(x, gate_at, n, wide_x);
                clamp_gate(s, wide_x, n);
                evaluate(s.curve, wide_x, n, curve, slope);
                Out(slope, n) *= (In(s.limit_behind ? curve : inside, n) <= limit).cast<float>();
                clamp_curve(s, curve, n);
            } else {
                evaluate(s.curve, read(x, gate_at, n, wide_x), n, curve, slope);
            }
            const In from(read(dy, r * s.ffn + i, n, grad), n);
            if (s.gated) {
                load(x, up_at, n, up); // dx may be x, so the values are copied.
                if (s.limit > 0.0) Out(inside, n) = (In(up, n).abs() <= limit).cast<float>();
                clamp_up(s, up, n);
            } else {
                Out(up, n).setOnes();
            }
            if (dprobs != nullptr) along += (from * In(curve, n) * In(up, n)).sum();
            if (y.data != nullptr) {
                float* again = target(y, r * s.ffn + i, wide_y);
                Out(again, n) = In(curve, n) * In(up, n) * p;
                flush(y, r * s.ffn + i, n, again);
            }
            float* out = target(dx, gate_at, wide_dx);
            Out(out, n) = from * In(up, n) * In(slope, n) * p;
            keep(out, n, dx, q, r, i, width);
            if (!s.gated) continue;
            out = target(dx, up_at, wide_dx);
            Out(out, n) = from * In(curve, n) * p;
            if (s.limit > 0.0) Out(out, n) *= In(inside, n);
            keep(out, n, dx, q, r, s.ffn + i, width);
        }
        if (dprobs != nullptr) dprobs[r] = along;
    }
}

void activation_grad_columns(const ActivationShape& s, Src dy, Src x, const float* probs, const std::int32_t* counts,
                             float* dprobs, Fp8Rows q, Fp8Columns dx, Fp8Columns y, void*) {
    const std::int64_t width = s.gated ? 2 * s.ffn : s.ffn;
    float *const wide_dx = scratch(Slot::j, scale_block * (width + s.ffn)), *const wide_y =
                                                                                wide_dx + scale_block * width;
    const auto round = [](float* values, std::int64_t n) {
        for (std::int64_t i = 0; i < n; ++i) values[i] = float_of_bf16(bf16_of_float(values[i]));
    };
    for_each_block({s.rows, width, s.groups}, counts, dx, [&](std::int64_t first, std::int64_t rows, Fp8Columns to) {
        ActivationShape block = s;
        block.rows = rows;
        activation_grad(block, dy + first * s.ffn, x + first * width, probs != nullptr ? probs + first : nullptr,
                        nullptr, {wide_dx, Type::f32}, dprobs != nullptr ? dprobs + first : nullptr,
                        {wide_y, Type::f32}, {q.data + first * width, q.scale + first * scale_blocks(width)}, nullptr);
        round(wide_dx, rows * width);
        round(wide_y, rows * s.ffn);
        put_columns(wide_dx, rows, width, false, to);
        put_columns(wide_y, rows, s.ffn, false, y);
        y.data += s.ffn * scale_block, y.scale += s.ffn;
    });
}

// A gate and its slope.
struct Gate {
    float value, slope;
    Gate(float x, bool softplus) {
        const float s = sigmoid(x);
        value = softplus ? std::max(x, 0.0f) + std::log1p(std::exp(-std::abs(x))) : s;
        slope = softplus ? s : s * (1.0f - s);
    }
};

void sigmoid_scale(Src y, Src g, Dst out, std::int64_t rows, std::int64_t cols, bool softplus, void*) {
    float* wide = scratch(Slot::a, cols);
    float* wide_out = scratch(Slot::b, cols);
    for (std::int64_t r = 0; r < rows; ++r) {
        float* to = target(out, r * cols, wide_out);
        Out(to, cols) = In(read(y, r * cols, cols, wide), cols) * Gate(value(g, r), softplus).value;
        flush(out, r * cols, cols, to);
    }
}

void sigmoid_scale_grad(Src dout, Src y, Src g, Dst dy, Dst dg, std::int64_t rows, std::int64_t cols, bool softplus,
                        void*) {
    float* wide = scratch(Slot::a, cols);
    float* wide_y = scratch(Slot::b, cols);
    float* wide_dy = scratch(Slot::c, cols);
    for (std::int64_t r = 0; r < rows; ++r) {
        const In grad(read(dout, r * cols, cols, wide), cols);
        const Gate gate(value(g, r), softplus);
        put(dg, r, (grad * In(read(y, r * cols, cols, wide_y), cols)).sum() * gate.slope);
        float* to = target(dy, r * cols, wide_dy);
        Out(to, cols) = grad * gate.value;
        flush(dy, r * cols, cols, to);
    }
}

void scale_rows(Src y, const float* p, const std::int32_t* counts, Dst out, int groups, std::int64_t rows,
                std::int64_t cols, void*) {
    if (counts != nullptr) rows = routed_rows(counts, groups, rows);
    float* wide = scratch(Slot::a, cols);
    float* wide_out = scratch(Slot::b, cols);
    for (std::int64_t r = 0; r < rows; ++r) {
        float* to = target(out, r * cols, wide_out);
        Out(to, cols) = In(read(y, r * cols, cols, wide), cols) * p[r];
        flush(out, r * cols, cols, to);
    }
}

void scale_rows_grad(Src dout, Src y, const float* p, const std::int32_t* counts, Dst dy, float* dp, int groups,
                     std::int64_t rows, std::int64_t cols, void*) {
    if (counts != nullptr) rows = routed_rows(counts, groups, rows);
    float* wide = scratch(Slot::a, cols);
    float* wide_y = scratch(Slot::b, cols);
    float* wide_dy = scratch(Slot::c, cols);
    for (std::int64_t r = 0; r < rows; ++r) {
        const In grad(read(dout, r * cols, cols, wide), cols);
        dp[r] = (grad * In(read(y, r * cols, cols, wide_y), cols)).sum();
        float* to = target(dy, r * cols, wide_dy);
        Out(to, cols) = grad * p[r];
        flush(dy, r * cols, cols, to);
    }
}

} // namespace

void add_activation(Kernels& table) {
    table.activation = activation;
    table.activation_grad = activation_grad;
    table.activation_grad_columns = activation_grad_columns;
    table.sigmoid_scale = sigmoid_scale;
    table.sigmoid_scale_grad = sigmoid_scale_grad;
    table.scale_rows = scale_rows;
    table.scale_rows_grad = scale_rows_grad;
}

} // namespace moe::cpu
