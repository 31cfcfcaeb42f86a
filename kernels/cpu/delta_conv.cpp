// What stands around a gated delta rule: the short convolution before it, the gated norm behind it.
#include "kernels/cpu/rows.hpp"

#include <cmath>

namespace moe::cpu {
namespace {

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
// Derivative of x sigmoid(x).
float silu_slope(float x) {
    const float s = sigmoid(x);
    return s * (1.0f + x * (1.0f - s));
}

// Of each channel of c, the row of the weights that is its own.
std::int64_t weight_row(const DeltaShape& s, std::int64_t channel) {
    const std::int64_t k = s.keys();
    if (channel < 2 * k) {
        const std::int64_t piece = channel / k;
        return (piece * s.parts + s.part) * k + channel % k;
    }
    return 2 * k * s.parts + s.part * s.values() + channel - 2 * k;
}

// Taps [kernel, convolved] of this part's channels, the one of the row itself first.
const float* taps(const DeltaShape& s, Src w) {
    const std::int64_t n = s.convolved();
    float* by_tap = scratch(Slot::a, s.kernel * n);
    for (std::int64_t c = 0; c < n; ++c)
        for (int j = 0; j < s.kernel; ++j) by_tap[j * n + c] = value(w, weight_row(s, c) * s.kernel + s.kernel - 1 - j);
    return by_tap;
}

// Rows before row r, itself among them, that its convolution reads.
std::int64_t reach(const DeltaShape& s, std::int64_t r) {
    const std::int64_t at = r / s.batch, first = s.document_start != nullptr ? s.document_start[r] : 0;
    return std::min<std::int64_t>(s.kernel, at - first + 1);
}

// The convolution of row r, before SiLU.
void convolve(const DeltaShape& s, Src p, const float* by_tap, std::int64_t r, float* buffer, float* sum) {
    const std::int64_t n = s.convolved();
    std::fill_n(sum, n, 0.0f);
    for (std::int64_t j = 0; j < reach(s, r); ++j) {
        const float* x = read(p, (r - j * s.batch) * s.projected(), n, buffer);
        for (std::int64_t c = 0; c < n; ++c) sum[c] += by_tap[j * n + c] * x[c];
    }
}

void short_conv(const DeltaShape& s, Src p, Src w, Dst c, void*) {
    const std::int64_t n = s.convolved();
    const float* by_tap = taps(s, w);
    float *buffer = scratch(Slot::b, n), *sum = scratch(Slot::c, n);
    for (std::int64_t r = 0; r < s.rows; ++r) {
        convolve(s, p, by_tap, r, buffer, sum);
        for (std::int64_t i = 0; i < n; ++i) sum[i] *= sigmoid(sum[i]);
        store(c, r * n, n, sum);
    }
}

// Gradients of a row of p are sums over it and the rows behind: `kernel` of them are open at a time.
void short_conv_grad(const DeltaShape& s, Src dc, Src p, Src w, Dst dp, float* dw, void*) {
    const std::int64_t n = s.convolved(), k = s.kernel;
    const float* by_tap = taps(s, w);
    float *buffer = scratch(Slot::b, n), *sum = scratch(Slot::c, n), *grad = scratch(Slot::d, n);
    float *open = scratch(Slot::e, k * s.batch * n), *tap_grad = scratch(Slot::f, k * n);
    std::fill_n(tap_grad, k * n, 0.0f);
    const auto slot = [&](std::int64_t r) { return open + (r / s.batch % k * s.batch + r % s.batch) * n; };
    const auto close = [&](std::int64_t r) { store(dp, r * s.projected(), n, slot(r)); };
    for (std::int64_t r = 0; r < s.rows; ++r) {
        if (r >= k * s.batch) close(r - k * s.batch);
        std::fill_n(slot(r), n, 0.0f);
        convolve(s, p, by_tap, r, buffer, sum);
        load(dc, r * n, n, grad);
        for (std::int64_t c = 0; c < n; ++c) grad[c] *= silu_slope(sum[c]);
        for (std::int64_t j = 0; j < reach(s, r); ++j) {
            const float* x = read(p, (r - j * s.batch) * s.projected(), n, buffer);
            float* dx = slot(r - j * s.batch);
            for (std::int64_t c = 0; c < n; ++c) {
                dx[c] += by_tap[j * n + c] * grad[c];
                tap_grad[j * n + c] += x[c] * grad[c];
            }
        }
    }
    for (std::int64_t r = std::max<std::int64_t>(0, s.rows - k * s.batch); r < s.rows; ++r) close(r);
    for (std::int64_t c = 0; c < n; ++c)
        for (std::int64_t j = 0; j < k; ++j) dw[weight_row(s, c) * k + k - 1 - j] += tap_grad[j * n + c];
}

// Reciprocal of the root mean square of n values.
float inverse_root(const float* x, std::int64_t n, double eps) {
    double sum = 0.0;
    for (std::int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    return static_cast<float>(1.0 / std::sqrt(sum / static_cast<double>(n) + eps));
}

void gated_norm(const DeltaShape& s, Src o, Src p, Src w, Dst y, void*) {
    const std::int64_t d = s.value_dim;
    float *x = scratch(Slot::b, d), *z = scratch(Slot::c, d), *weight = scratch(Slot::d, d);
    load(w, 0, d, weight);
    for (std::int64_t r = 0; r < s.rows; ++r)
        for (std::int64_t h = 0; h < s.value_heads; ++h) {
            load(o, r * s.values() + h * d, d, x);
            load(p, r * s.projected() + s.convolved() + h * d, d, z);
            const float inverse = inverse_root(x, d, s.eps);
            for (std::int64_t i = 0; i < d; ++i) x[i] *= inverse * weight[i] * z[i] * sigmoid(z[i]);
            store(y, r * s.values() + h * d, d, x);
        }
}

void gated_norm_grad(const DeltaShape& s, Src dy, Src o, Src p, Src w, Dst dout, Dst dp, float* dw, void*) {
    const std::int64_t d = s.value_dim;
    float *x = scratch(Slot::b, d), *z = scratch(Slot::c, d), *weight = scratch(Slot::d, d), *g = scratch(Slot::e, d);
    load(w, 0, d, weight);
    for (std::int64_t r = 0; r < s.rows; ++r)
        for (std::int64_t h = 0; h < s.value_heads; ++h) {
            const std::int64_t at = r * s.values() + h * d, gate = r * s.projected() + s.convolved() + h * d;
            load(o, at, d, x);
            load(p, gate, d, z);
            load(dy, at, d, g);
            const float inverse = inverse_root(x, d, s.eps);
            double along = 0.0;
            for (std::int64_t i = 0; i < d; ++i) {
                const float unit = x[i] * inverse, dnormed = g[i] * z[i] * sigmoid(z[i]);
                z[i] = g[i] * unit * weight[i] * silu_slope(z[i]);
                dw[i] += dnormed * unit;
                x[i] = unit;
                g[i] = dnormed * weight[i];
                along += static_cast<double>(g[i]) * static_cast<double>(unit);
            }
            const auto mean = static_cast<float>(along / static_cast<double>(d));
            for (std::int64_t i = 0; i < d; ++i) x[i] = inverse * (g[i] - x[i] * mean);
            store(dout, at, d, x);
            store(dp, gate, d, z);
        }
}

} // namespace

void add_delta_conv(Kernels& table) {
    table.short_conv = short_conv;
    table.short_conv_grad = short_conv_grad;
    table.gated_norm = gated_norm;
    table.gated_norm_grad = gated_norm_grad;
}

} // namespace moe::cpu
