// The gated delta rule in chunks: within a chunk a triangular system, from chunk to chunk a state.
//
// With G the sums of g within a chunk, D_ij = exp(G_i - G_j) for j <= i, e = exp(G) and f = exp(G_last - G):
//   A_ij = beta_i (k_i . k_j) D_ij (j < i);  W = (I + A)^-1 (beta e k);  V' = (I + A)^-1 (beta v) - W S
//   o = e q S + (q k^T o D) V';  S <- e_last S + (f k)^T V'
// (Yang et al., arXiv:2412.06464, section 3.3; the WY form of arXiv:2406.06484). D, e and f are 0 between rows of two
// documents. The gradients are those of these formulas: dA = -(dX W^T + dY U^T) with dX and dY those of both systems'
// right sides, U = V' + W S.
#include "kernels/cpu/state_rows.hpp"

#include <Eigen/LU>

namespace moe::cpu {
namespace {

constexpr float unit_eps = 1e-6f;

// What the formulas above name, of n positions from `at` on.
struct Chunk : Decays {
    std::int64_t at = 0, n = 0;
    Matrix q, k, v, a, scores, w, fresh; // scores q k^T o D, fresh V'
    Vector beta, g, q_inverse, k_inverse;
};

void unit_rows(Matrix& x, Vector& inverse, float scale) {
    inverse = (x.rowwise().squaredNorm().array() + unit_eps).rsqrt();
    x = (inverse * scale).asDiagonal() * x;
}

void read_rows(const Head& head, Chunk& z) {
    const StateShape& s = head.s;
    z.q.resize(z.n, s.key_dim), z.k.resize(z.n, s.key_dim), z.v.resize(z.n, s.value_dim);
    z.beta.resize(z.n), z.g.resize(z.n);
    for (std::int64_t i = 0; i < z.n; ++i) {
        load(head.c, head.q_at(z.at + i), s.key_dim, z.q.row(i).data());
        load(head.c, head.k_at(z.at + i), s.key_dim, z.k.row(i).data());
        load(head.c, head.v_at(z.at + i), s.value_dim, z.v.row(i).data());
        z.beta[i] = sigmoid(value(head.p, head.first_gate(z.at + i)));
        z.g[i] = -head.rate * softplus(value(head.p, head.first_gate(z.at + i) + s.value_heads) + head.bias);
    }
    unit_rows(z.q, z.q_inverse, 1.0f / std::sqrt(static_cast<float>(s.key_dim)));
    unit_rows(z.k, z.k_inverse, 1.0f);
}

// All but `fresh`, which holds (I + A)^-1 (beta v) instead.
void read_chunk(const Head& head, std::int64_t at, Chunk& z) {
    z.at = at, z.n = std::min<std::int64_t>(state_chunk, head.s.seq() - at);
    read_rows(head, z);
    read_decays(head, at, z.g, z);
    z.scores = (z.q * z.k.transpose()).cwiseProduct(z.decay);
    z.a = z.beta.asDiagonal() * (z.k * z.k.transpose()).cwiseProduct(z.decay);
    z.w = z.beta.cwiseProduct(z.e).asDiagonal() * z.k;
    z.fresh = z.beta.asDiagonal() * z.v;
    const auto system = z.a.triangularView<Eigen::UnitLower>();
    system.solveInPlace(z.w);
    system.solveInPlace(z.fresh);
}

// The state behind the chunk; `fresh` becomes V'.
void pass(Chunk& z, Matrix& state) {
    z.fresh.noalias() -= z.w * state;
    state *= z.carried;
    state.noalias() += (z.f.asDiagonal() * z.k).transpose() * z.fresh;
}

void delta_rule(const StateShape& s, Src c, Src p, Src a_log, Src dt_bias, Dst o, float*, void*) {
    Chunk z;
    for (std::int64_t b = 0; b < s.batch; ++b)
        for (std::int64_t h = 0; h < s.value_heads; ++h) {
            const Head head = head_of(s, c, p, a_log, dt_bias, b, h);
            Matrix state = Matrix::Zero(s.key_dim, s.value_dim), out;
            for (std::int64_t at = 0; at < s.seq(); at += state_chunk) {
                read_chunk(head, at, z);
                out = z.e.asDiagonal() * (z.q * state);
                pass(z, state);
                out.noalias() += z.scores * z.fresh;
                for (std::int64_t i = 0; i < z.n; ++i) store(o, head.o_at(at + i), s.value_dim, out.row(i).data());
            }
        }
}

// The gradients of a chunk's operands; those of queries and keys are of the unit ones.
struct ChunkGradients {
    Matrix dout, dq, dk, dv;
    Vector dbeta, dg;
};

// `state` is that before the chunk; dstate goes from behind the chunk to before it.
void chunk_grad(const Chunk& z, const Matrix& state, Matrix& dstate, ChunkGradients& d) {
    const Matrix keys_forward = z.f.asDiagonal() * z.k;
    const Matrix dfresh = z.scores.transpose() * d.dout + keys_forward * dstate;
    const Matrix lower = Matrix(d.dout * z.fresh.transpose()).triangularView<Eigen::Lower>();
    const Matrix dscores = lower.cwiseProduct(z.decay);
    // Queries and keys of the state.
    d.dq = z.e.asDiagonal() * (d.dout * state.transpose());
    d.dk = z.f.asDiagonal() * (z.fresh * dstate.transpose());
    d.dg = along(z.q, d.dq);
    const Vector forward = along(z.k, d.dk);
    d.dg -= forward;
    d.dg[z.n - 1] += forward.sum() + z.carried * state.cwiseProduct(dstate).sum();
    // Of the scores.
    d.dq.noalias() += dscores * z.k;
    d.dk.noalias() += dscores.transpose() * z.q;
    const Matrix of_scores = lower.cwiseProduct(z.scores);
    d.dg += of_scores.rowwise().sum() - of_scores.colwise().sum().transpose();
    // Of the state before, and of both systems.
    Matrix dx = -(dfresh * state.transpose()), dy;
    dy = dfresh;
    dstate *= z.carried;
    dstate.noalias() += (z.e.asDiagonal() * z.q).transpose() * d.dout;
    dstate.noalias() -= z.w.transpose() * dfresh;
    const auto system = z.a.triangularView<Eigen::UnitLower>().transpose();
    system.solveInPlace(dx);
    system.solveInPlace(dy);
    const Matrix u = z.fresh + z.w * state;
    const Matrix da = Matrix(-(dx * z.w.transpose() + dy * u.transpose())).triangularView<Eigen::StrictlyLower>();
    // Of their right sides.
    d.dv = z.beta.asDiagonal() * dy;
    const Vector of_x = z.e.cwiseProduct(along(z.k, dx));
    d.dbeta = of_x + along(z.v, dy);
    d.dg += z.beta.cwiseProduct(of_x);
    d.dk += z.beta.cwiseProduct(z.e).asDiagonal() * dx;
    // Of A, below whose diagonal it is beta (k k^T) D.
    const Matrix product = da.cwiseProduct(z.decay), of_a = da.cwiseProduct(z.a);
    d.dbeta += along(product, z.k * z.k.transpose());
    const Matrix weighted = z.beta.asDiagonal() * product;
    d.dk.noalias() += weighted * z.k;
    d.dk.noalias() += weighted.transpose() * z.k;
    d.dg += of_a.rowwise().sum() - of_a.colwise().sum().transpose();
    sum_from_behind(d.dg);
}

// From unit rows to the rows that they were made of; `scale` as in unit_rows().
void to_raw(const Matrix& unit, const Vector& inverse, float scale, Matrix& d) {
    const Vector share = along(unit, d) / (scale * scale);
    d = (inverse * scale).asDiagonal() * (d - share.asDiagonal() * unit);
}

struct GateGradients { // of a head's weights
    double a_log = 0.0, dt_bias = 0.0;
};

void write_gates(const Head& head, const Chunk& z, const ChunkGradients& d, Dst dp, GateGradients& sums) {
    const StateShape& s = head.s;
    for (std::int64_t i = 0; i < z.n; ++i) {
        const float beta = z.beta[i];
        put(dp, head.first_gate(z.at + i), d.dbeta[i] * beta * (1.0f - beta));
        const float step = value(head.p, head.first_gate(z.at + i) + s.value_heads) + head.bias;
        const float da = -d.dg[i] * head.rate * sigmoid(step);
        put(dp, head.first_gate(z.at + i) + s.value_heads, da);
        sums.a_log += static_cast<double>(d.dg[i] * z.g[i]);
        sums.dt_bias += static_cast<double>(da);
    }
}

// Adds a head's part to dq and dk [seq, key_dim] of its key head; dv, the gates and their weights are written.
void head_grad(const Head& head, Src dout, Map dq, Map dk, Dst dc, Dst dp, GateGradients& sums) {
    const StateShape& s = head.s;
    const float scale = 1.0f / std::sqrt(static_cast<float>(s.key_dim));
    float* states = scratch(Slot::b, s.chunks() * s.key_dim * s.value_dim);
    Chunk z;
    Matrix state = Matrix::Zero(s.key_dim, s.value_dim);
    for (std::int64_t i = 0; i < s.chunks(); ++i) {
        Map(states + i * state.size(), s.key_dim, s.value_dim) = state;
        read_chunk(head, i * state_chunk, z);
        pass(z, state);
    }
    Matrix dstate = Matrix::Zero(s.key_dim, s.value_dim);
    ChunkGradients d;
    for (std::int64_t i = s.chunks() - 1; i >= 0; --i) {
        state = Map(states + i * state.size(), s.key_dim, s.value_dim);
        read_chunk(head, i * state_chunk, z);
        z.fresh.noalias() -= z.w * state;
        d.dout.resize(z.n, s.value_dim);
        for (std::int64_t r = 0; r < z.n; ++r) load(dout, head.o_at(z.at + r), s.value_dim, d.dout.row(r).data());
        chunk_grad(z, state, dstate, d);
        to_raw(z.q, z.q_inverse, scale, d.dq);
        to_raw(z.k, z.k_inverse, 1.0f, d.dk);
        dq.middleRows(z.at, z.n) += d.dq;
        dk.middleRows(z.at, z.n) += d.dk;
        for (std::int64_t r = 0; r < z.n; ++r) store(dc, head.v_at(z.at + r), s.value_dim, d.dv.row(r).data());
        write_gates(head, z, d, dp, sums);
    }
}

void delta_rule_grad(const StateShape& s, Src dout, Src c, Src p, Src a_log, Src dt_bias, Dst dc, Dst dp, float* da_log,
                     float* ddt_bias, float*, void*) {
    const std::int64_t share = s.value_heads / s.key_heads;
    float* sums = scratch(Slot::c, 2 * s.seq() * s.key_dim);
    Map dq(sums, s.seq(), s.key_dim), dk(sums + s.seq() * s.key_dim, s.seq(), s.key_dim);
    for (std::int64_t b = 0; b < s.batch; ++b)
        for (std::int64_t h = 0; h < s.value_heads; ++h) {
            const Head head = head_of(s, c, p, a_log, dt_bias, b, h);
            if (h % share == 0) dq.setZero(), dk.setZero();
            GateGradients gates;
            head_grad(head, dout, dq, dk, dc, dp, gates);
            const std::int64_t weight = head_weight(s, h);
            da_log[weight] += static_cast<float>(gates.a_log);
            ddt_bias[weight] += static_cast<float>(gates.dt_bias);
            if ((h + 1) % share != 0) continue;
            for (std::int64_t at = 0; at < s.seq(); ++at) {
                store(dc, head.q_at(at), s.key_dim, dq.row(at).data());
                store(dc, head.k_at(at), s.key_dim, dk.row(at).data());
            }
        }
}

// One position after the other, by the recurrence itself.
void delta_cached(const StateShape& s, Src p, Src w, Src a_log, Src dt_bias, const std::int32_t* positions, Dst o,
                  Dst window, float* state, void*) {
    const std::int64_t size = std::int64_t{s.key_dim} * s.value_dim;
    float* row = scratch(Slot::d, s.convolved());
    const StateShape one{1, 1, s.key_heads, s.value_heads, s.key_dim, s.value_dim, s.kernel, s.eps};
    Chunk z;
    z.n = 1;
    for (std::int64_t r = 0; r < s.rows; ++r) {
        convolve_cached(s, p, w, {}, r, positions[r], window, state, row);
        for (std::int64_t h = 0; h < s.value_heads; ++h) {
            read_rows(head_of(one, {row, Type::f32}, p + r * s.projected(), a_log, dt_bias, 0, h), z);
            Map at(state + h * size, s.key_dim, s.value_dim);
            at *= std::exp(z.g[0]);
            const Matrix change = z.beta[0] * (z.v - z.k * at);
            at.noalias() += z.k.transpose() * change;
            const Matrix out = z.q * at;
            store(o, r * s.values() + h * s.value_dim, s.value_dim, out.data());
        }
    }
}

} // namespace

void add_delta_rule(Kernels& table) {
    table.delta_rule = delta_rule;
    table.delta_rule_grad = delta_rule_grad;
    table.delta_cached = delta_cached;
}

} // namespace moe::cpu
