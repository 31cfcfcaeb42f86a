// What stands around the rule of a layer with a state: the short convolution before it, the gated norm behind it.
#include "kernels/cpu/state_rows.hpp"

namespace moe::cpu {
namespace {

// Derivative of x sigmoid(x).
float silu_slope(float x) {
    const float s = sigmoid(x);
    return s * (1.0f + x * (1.0f - s));
}

// Of each channel of c, the row of the weights that is its own.
std::int64_t weight_row(const StateShape& s, std::int64_t channel) {
    const std::int64_t k = s.keys();
    if (channel < 2 * k) {
        const std::int64_t piece = channel / k;
        return (piece * s.parts + s.part) * k + channel % k;
    }
    return 2 * k * s.parts + s.part * s.values() + channel - 2 * k;
}

// Taps [kernel, convolved] of this part's channels, the one of the row itself first.
const float* taps(const StateShape& s, Src w) {
    const std::int64_t n = s.convolved();
    float* by_tap = scratch(Slot::a, s.kernel * n);
    for (std::int64_t c = 0; c < n; ++c)
        for (int j = 0; j < s.kernel; ++j) by_tap[j * n + c] = value(w, weight_row(s, c) * s.kernel + s.kernel - 1 - j);
    return by_tap;
}

// Biases of this part's channels, zeros where there are none.
const float* biases(const StateShape& s, Src bias) {
    const std::int64_t n = s.convolved();
    float* by_channel = scratch(Slot::g, n);
    for (std::int64_t c = 0; c < n; ++c) by_channel[c] = bias.data != nullptr ? value(bias, weight_row(s, c)) : 0.0f;
    return by_channel;
}

// Rows before row r, itself among them, that its convolution reads.
std::int64_t reach(const StateShape& s, std::int64_t r) {
    const std::int64_t at = r / s.batch, first = s.document_start != nullptr ? s.document_start[r] : 0;
    return std::min<std::int64_t>(s.kernel, at - first + 1);
}

// The convolution of row r, before SiLU.
void convolve(const StateShape& s, Src p, const float* by_tap, const float* by_channel, std::int64_t r, float* buffer,
              float* sum) {
    const std::int64_t n = s.convolved();
    std::copy_n(by_channel, n, sum);
    for (std::int64_t j = 0; j < reach(s, r); ++j) {
        const float* x = read(p, (r - j * s.batch) * s.projected(), n, buffer);
        for (std::int64_t c = 0; c < n; ++c) sum[c] += by_tap[j * n + c] * x[c];
    }
}

void short_conv(const StateShape& s, Src p, Src w, Src bias, Dst c, void*) {
    const std::int64_t n = s.convolved();
    const float *by_tap = taps(s, w), *by_channel = biases(s, bias);
    float *buffer = scratch(Slot::b, n), *sum = scratch(Slot::c, n);
    for (std::int64_t r = 0; r < s.rows; ++r) {
        convolve(s, p, by_tap, by_channel, r, buffer, sum);
        for (std::int64_t i = 0; i < n; ++i) sum[i] *= sigmoid(sum[i]);
        store(c, r * n, n, sum);
    }
}

// Gradients of a row of p are sums over it and the rows behind: `kernel` of them are open at a time.
void short_conv_grad(const StateShape& s, Src dc, Src p, Src w, Src bias, Dst dp, float* dw, float* dbias, void*) {
    const std::int64_t n = s.convolved(), k = s.kernel;
    const float *by_tap = taps(s, w), *by_channel = biases(s, bias);
    float *buffer = scratch(Slot::b, n), *sum = scratch(Slot::c, n), *grad = scratch(Slot::d, n);
    float *open = scratch(Slot::e, k * s.batch * n), *tap_grad = scratch(Slot::f, k * n),
          *bias_grad = scratch(Slot::h, n);
    std::fill_n(tap_grad, k * n, 0.0f);
    std::fill_n(bias_grad, n, 0.0f);
    const auto slot = [&](std::int64_t r) { return open + (r / s.batch % k * s.batch + r % s.batch) * n; };
    const auto close = [&](std::int64_t r) { store(dp, r * s.projected(), n, slot(r)); };
    for (std::int64_t r = 0; r < s.rows; ++r) {
        if (r >= k * s.batch) close(r - k * s.batch);
        std::fill_n(slot(r), n, 0.0f);
        convolve(s, p, by_tap, by_channel, r, buffer, sum);
        load(dc, r * n, n, grad);
        for (std::int64_t c = 0; c < n; ++c) bias_grad[c] += grad[c] *= silu_slope(sum[c]);
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
    for (std::int64_t c = 0; dbias != nullptr && c < n; ++c) dbias[weight_row(s, c)] += bias_grad[c];
}

// Reciprocal of the root mean square of n values.
float inverse_root(const float* x, std::int64_t n, double eps) {
    double sum = 0.0;
    for (std::int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    return static_cast<float>(1.0 / std::sqrt(sum / static_cast<double>(n) + eps));
}

// Calls use(first column of o, first element of the weights) of each norm of a row.
template <class Use>
void each_norm(const StateShape& s, Use use) {
    const std::int64_t d = s.norm_columns();
    const bool shared = s.rule == StateRule::delta; // by all heads
    for (std::int64_t c = 0; c < s.values(); c += d) use(c, shared ? 0 : s.part * s.values() + c);
}

// delta: the gate times the norm of x; ssd: the norm of the gate times x. In place.
void gate_and_norm(const StateShape& s, float* x, const float* z, const float* weight) {
    const std::int64_t d = s.norm_columns();
    const bool behind = s.rule == StateRule::ssd; // the norm is
    for (std::int64_t i = 0; behind && i < d; ++i) x[i] *= z[i] * sigmoid(z[i]);
    const float inverse = inverse_root(x, d, s.eps);
    for (std::int64_t i = 0; i < d; ++i) x[i] *= inverse * weight[i] * (behind ? 1.0f : z[i] * sigmoid(z[i]));
}

void gated_norm(const StateShape& s, Src o, Src p, Src w, Dst y, void*) {
    const std::int64_t d = s.norm_columns();
    float *x = scratch(Slot::b, d), *z = scratch(Slot::c, d), *weight = scratch(Slot::d, d);
    for (std::int64_t r = 0; r < s.rows; ++r)
        each_norm(s, [&](std::int64_t c, std::int64_t first) {
            load(w, first, d, weight);
            load(o, r * s.values() + c, d, x);
            load(p, r * s.projected() + s.convolved() + c, d, z);
            gate_and_norm(s, x, z, weight);
            store(y, r * s.values() + c, d, x);
        });
}

// The gradient g of one norm's result becomes those of x and z, in their places; that of the weights is added to dw.
void norm_grad(const StateShape& s, float* x, float* z, const float* weight, float* g, float* dw) {
    const std::int64_t d = s.norm_columns();
    const bool behind = s.rule == StateRule::ssd;
    float* raw = scratch(Slot::f, d);
    std::copy_n(x, d, raw);
    for (std::int64_t i = 0; behind && i < d; ++i) x[i] *= z[i] * sigmoid(z[i]);
    const float inverse = inverse_root(x, d, s.eps);
    double along = 0.0;
    for (std::int64_t i = 0; i < d; ++i) {
        const float unit = x[i] * inverse, dnormed = behind ? g[i] : g[i] * z[i] * sigmoid(z[i]);
        if (!behind) z[i] = g[i] * unit * weight[i] * silu_slope(z[i]);
        dw[i] += dnormed * unit;
        x[i] = unit;
        g[i] = dnormed * weight[i];
        along += static_cast<double>(g[i]) * static_cast<double>(unit);
    }
    const auto mean = static_cast<float>(along / static_cast<double>(d));
    for (std::int64_t i = 0; i < d; ++i) x[i] = inverse * (g[i] - x[i] * mean);
    for (std::int64_t i = 0; behind && i < d; ++i) {
        const float gate = z[i] * sigmoid(z[i]);
        z[i] = x[i] * raw[i] * silu_slope(z[i]);
        x[i] *= gate;
    }
}

void gated_norm_grad(const StateShape& s, Src dy, Src o, Src p, Src w, Dst dout, Dst dp, float* dw, void*) {
    const std::int64_t d = s.norm_columns();
    float *x = scratch(Slot::b, d), *z = scratch(Slot::c, d), *weight = scratch(Slot::d, d), *g = scratch(Slot::e, d);
    for (std::int64_t r = 0; r < s.rows; ++r)
        each_norm(s, [&](std::int64_t c, std::int64_t first) {
            const std::int64_t at = r * s.values() + c, gate = r * s.projected() + s.convolved() + c;
            load(w, first, d, weight);
            load(o, at, d, x);
            load(p, gate, d, z);
            load(dy, at, d, g);
            norm_grad(s, x, z, weight, g, dw + first);
            store(dout, at, d, x);
            store(dp, gate, d, z);
        });
}

} // namespace

void convolve_cached(const StateShape& s, Src p, Src w, Src bias, std::int64_t r, std::int32_t position, Dst window,
                     float* state, float* row) {
    const std::int64_t n = s.convolved(), before = s.kernel - 1;
    const Src past{window.data, window.type};
    if (position == 0) {
        for (std::int64_t i = 0; i < before * n; ++i) put(window, i, 0.0f);
        std::fill_n(state, s.values() * s.key_dim, 0.0f);
    }
    for (std::int64_t i = 0; i < n; ++i) {
        float sum = value(w, i * s.kernel + before) * value(p, r * s.projected() + i);
        if (bias.data != nullptr) sum += value(bias, i);
        for (std::int64_t j = 0; j < before; ++j) sum += value(w, i * s.kernel + j) * value(past, j * n + i);
        row[i] = sum * sigmoid(sum);
    }
    for (std::int64_t j = 0; j + 1 < before; ++j) move(past, (j + 1) * n, window, j * n, n);
    if (before > 0) move(p, r * s.projected(), window, (before - 1) * n, n);
}

void add_delta_conv(Kernels& table) {
    table.short_conv = short_conv;
    table.short_conv_grad = short_conv_grad;
    table.gated_norm = gated_norm;
    table.gated_norm_grad = gated_norm_grad;
}

} // namespace moe::cpu
