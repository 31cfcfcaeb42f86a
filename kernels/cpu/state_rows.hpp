// What the CPU's kernels of layers with a state share: where a head's rows lie, and the decays within a chunk.
#pragma once

#include "kernels/cpu/rows.hpp"

#include <Eigen/Core>

#include <cmath>

namespace moe::cpu {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Map = Eigen::Map<Matrix>;
using Vector = Eigen::Matrix<float, Eigen::Dynamic, 1>;

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// The operands of a head: where its rows lie, and the numbers of its gates.
struct Head {
    const StateShape& s;
    Src c, p;
    std::int64_t b, h, k; // sequence, value head, its key head
    float rate, bias;     // exp(a_log), dt_bias
    std::int64_t row(std::int64_t at) const { return at * s.batch + b; }
    std::int64_t q_at(std::int64_t at) const { return row(at) * s.convolved() + k * s.key_dim; }
    std::int64_t k_at(std::int64_t at) const { return q_at(at) + s.keys(); }
    std::int64_t v_at(std::int64_t at) const { return row(at) * s.convolved() + 2 * s.keys() + h * s.value_dim; }
    std::int64_t o_at(std::int64_t at) const { return row(at) * s.values() + h * s.value_dim; }
    std::int64_t first_gate(std::int64_t at) const { return row(at) * s.projected() + s.gates() + h; }
    std::int64_t start(std::int64_t at) const { return s.document_start != nullptr ? s.document_start[row(at)] : 0; }
};

// Of a head's weights, the one that is its own.
inline std::int64_t head_weight(const StateShape& s, std::int64_t h) {
    return std::int64_t{s.part} * s.value_heads + h;
}

inline Head head_of(const StateShape& s, Src c, Src p, Src a_log, Src dt_bias, std::int64_t b, std::int64_t h) {
    const std::int64_t weight = head_weight(s, h);
    return {s, c, p, b, h, h / (s.value_heads / s.key_heads), std::exp(value(a_log, weight)), value(dt_bias, weight)};
}

// With G the sums of g within a chunk: D_ij = exp(G_i - G_j) for j <= i, e = exp(G), f = exp(G_last - G), and what is
// carried of the state before the chunk to the one behind it. D, e and f are 0 between rows of two documents.
struct Decays {
    Matrix decay; // D
    Vector e, f;
    float carried = 0.0f;
};

// Of the positions [at, at + g.size()).
inline void read_decays(const Head& head, std::int64_t at, const Vector& g, Decays& out) {
    const std::int64_t n = g.size();
    out.decay.setZero(n, n), out.e.resize(n), out.f.resize(n);
    Vector sum(n);
    for (std::int64_t i = 0; i < n; ++i) {
        sum[i] = g[i] + (i > 0 ? sum[i - 1] : 0.0f);
        for (std::int64_t j = std::max<std::int64_t>(0, head.start(at + i) - at); j <= i; ++j)
            out.decay(i, j) = std::exp(sum[i] - sum[j]);
        // Of a chunk whose first row begins a document nothing is carried.
        out.e[i] = head.start(at + i) < at ? std::exp(sum[i]) : 0.0f;
    }
    out.f = out.decay.row(n - 1).transpose();
    out.carried = out.e[n - 1];
}

// The sums within a chunk, from its last row on: gradients of g from those of the sums G.
inline void sum_from_behind(Vector& d) {
    for (std::int64_t i = d.size() - 2; i >= 0; --i) d[i] += d[i + 1];
}

inline Vector along(const Matrix& x, const Matrix& y) { return x.cwiseProduct(y).rowwise().sum(); }

// The convolution of row r of p behind a window of the rows before it, with SiLU, into row[convolved]; the window moves
// on. At position 0 window and state begin anew.
void convolve_cached(const StateShape& shape, Src p, Src w, Src bias, std::int64_t r, std::int32_t position, Dst window,
                     float* state, float* row);

} // namespace moe::cpu
