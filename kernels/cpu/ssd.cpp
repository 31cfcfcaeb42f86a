// Mamba-2's state space duality in chunks: within a chunk products of rows, from chunk to chunk a state.
//
// With D, e, f and what is carried as Decays has them, u = dt v and M = (q k^T) o D:
//   o = e q S + M u + skip v;  S <- carried S + (f k)^T u
// (Dao and Gu, arXiv:2405.21060, section 6). The gradients are those of these formulas: with N = (do u^T) o D below the
// diagonal and R = do S^T, Q = u dS^T of the states,
//   dq = N k + e R;  dk = N^T q + f Q;  du = M^T do + f k dS;  dS <- carried dS + (e q)^T do
// and of the sums G: the rows less the columns of N o (q k^T), q . (e R), less k . (f Q), whose sum is the last row's.
#include "kernels/cpu/state_rows.hpp"

namespace moe::cpu {
namespace {

// What the formulas above name, of n positions from `at` on.
struct Chunk : Decays {
    std::int64_t at = 0, n = 0;
    Matrix q, k, v, u, scores; // scores M
    Vector step, g;            // dt
};

float width_of_step(const Head& head, std::int64_t at) {
    return std::clamp(softplus(value(head.p, head.first_gate(at)) + head.bias), head.s.step_min, head.s.step_max);
}

void read_rows(const Head& head, std::int64_t at, std::int64_t n, Chunk& z) {
    const StateShape& s = head.s;
    z.at = at, z.n = n;
    z.q.resize(n, s.key_dim), z.k.resize(n, s.key_dim), z.v.resize(n, s.value_dim), z.step.resize(n);
    for (std::int64_t i = 0; i < n; ++i) {
        load(head.c, head.q_at(at + i), s.key_dim, z.q.row(i).data());
        load(head.c, head.k_at(at + i), s.key_dim, z.k.row(i).data());
        load(head.c, head.v_at(at + i), s.value_dim, z.v.row(i).data());
        z.step[i] = width_of_step(head, at + i);
    }
    z.g = -head.rate * z.step;
    z.u = z.step.asDiagonal() * z.v;
}

void read_chunk(const Head& head, std::int64_t at, Chunk& z) {
    read_rows(head, at, std::min<std::int64_t>(state_chunk, head.s.seq() - at), z);
    read_decays(head, at, z.g, z);
    z.scores = (z.q * z.k.transpose()).cwiseProduct(z.decay);
}

// The state behind the chunk.
void pass(const Chunk& z, Matrix& state) {
    state *= z.carried;
    state.noalias() += (z.f.asDiagonal() * z.k).transpose() * z.u;
}

void ssd(const StateShape& s, Src c, Src p, Src a_log, Src dt_bias, Src skip, Dst o, float*, void*) {
    Chunk z;
    for (std::int64_t b = 0; b < s.batch; ++b)
        for (std::int64_t h = 0; h < s.value_heads; ++h) {
            const Head head = head_of(s, c, p, a_log, dt_bias, b, h);
            const float passed = value(skip, head_weight(s, h));
            Matrix state = Matrix::Zero(s.key_dim, s.value_dim), out;
            for (std::int64_t at = 0; at < s.seq(); at += state_chunk) {
                read_chunk(head, at, z);
                out = z.e.asDiagonal() * (z.q * state);
                out.noalias() += z.scores * z.u;
                out += passed * z.v;
                pass(z, state);
                for (std::int64_t i = 0; i < z.n; ++i) store(o, head.o_at(at + i), s.value_dim, out.row(i).data());
            }
        }
}

// The gradients of a chunk's operands; dv without what `skip` passes on.
struct ChunkGradients {
    Matrix dout, dq, dk, dv;
    Vector dstep, dg;
};

// `state` is that before the chunk; dstate goes from behind the chunk to before it.
void chunk_grad(const Head& head, const Chunk& z, const Matrix& state, Matrix& dstate, ChunkGradients& d) {
    Matrix du = z.scores.transpose() * d.dout;
    du.noalias() += z.f.asDiagonal() * (z.k * dstate);
    const Matrix lower = Matrix(d.dout * z.u.transpose()).triangularView<Eigen::Lower>();
    const Matrix dscores = lower.cwiseProduct(z.decay);
    d.dq = z.e.asDiagonal() * (d.dout * state.transpose());
    d.dk = z.f.asDiagonal() * (z.u * dstate.transpose());
    d.dg = along(z.q, d.dq);
    const Vector forward = along(z.k, d.dk);
    d.dg -= forward;
    d.dg[z.n - 1] += forward.sum() + z.carried * state.cwiseProduct(dstate).sum();
    d.dq.noalias() += dscores * z.k;
    d.dk.noalias() += dscores.transpose() * z.q;
    const Matrix of_scores = lower.cwiseProduct(z.scores);
    d.dg += of_scores.rowwise().sum() - of_scores.colwise().sum().transpose();
    sum_from_behind(d.dg);
    dstate *= z.carried;
    dstate.noalias() += (z.e.asDiagonal() * z.q).transpose() * d.dout;
    d.dv = z.step.asDiagonal() * du;
    d.dstep = along(z.v, du) - head.rate * d.dg;
}

struct WeightGradients { // of a head
    double a_log = 0.0, dt_bias = 0.0, skip = 0.0;
};

// A step at a bound moves no longer.
void write_steps(const Head& head, const Chunk& z, const ChunkGradients& d, Dst dp, WeightGradients& sums) {
    for (std::int64_t i = 0; i < z.n; ++i) {
        const float raw = value(head.p, head.first_gate(z.at + i)) + head.bias, width = softplus(raw);
        const bool moves = width >= head.s.step_min && width <= head.s.step_max;
        const float draw = moves ? d.dstep[i] * sigmoid(raw) : 0.0f;
        put(dp, head.first_gate(z.at + i), draw);
        sums.a_log += static_cast<double>(d.dg[i] * z.g[i]);
        sums.dt_bias += static_cast<double>(draw);
    }
}

// Adds a head's part to dq and dk [seq, key_dim] of its group; dv, the steps and the sums of its weights are written.
void head_grad(const Head& head, float skip, Src dout, Map dq, Map dk, Dst dc, Dst dp, WeightGradients& sums) {
    const StateShape& s = head.s;
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
        d.dout.resize(z.n, s.value_dim);
        for (std::int64_t r = 0; r < z.n; ++r) load(dout, head.o_at(z.at + r), s.value_dim, d.dout.row(r).data());
        chunk_grad(head, z, state, dstate, d);
        sums.skip += static_cast<double>(d.dout.cwiseProduct(z.v).sum());
        d.dv += skip * d.dout;
        dq.middleRows(z.at, z.n) += d.dq;
        dk.middleRows(z.at, z.n) += d.dk;
        for (std::int64_t r = 0; r < z.n; ++r) store(dc, head.v_at(z.at + r), s.value_dim, d.dv.row(r).data());
        write_steps(head, z, d, dp, sums);
    }
}

void ssd_grad(const StateShape& s, Src dout, Src c, Src p, Src a_log, Src dt_bias, Src skip, Dst dc, Dst dp,
              float* da_log, float* ddt_bias, float* dskip, float*, void*) {
    const std::int64_t share = s.value_heads / s.key_heads;
    float* sums = scratch(Slot::c, 2 * s.seq() * s.key_dim);
    Map dq(sums, s.seq(), s.key_dim), dk(sums + s.seq() * s.key_dim, s.seq(), s.key_dim);
    for (std::int64_t b = 0; b < s.batch; ++b)
        for (std::int64_t h = 0; h < s.value_heads; ++h) {
            const Head head = head_of(s, c, p, a_log, dt_bias, b, h);
            const std::int64_t weight = head_weight(s, h);
            if (h % share == 0) dq.setZero(), dk.setZero();
            WeightGradients of_weights;
            head_grad(head, value(skip, weight), dout, dq, dk, dc, dp, of_weights);
            da_log[weight] += static_cast<float>(of_weights.a_log);
            ddt_bias[weight] += static_cast<float>(of_weights.dt_bias);
            dskip[weight] += static_cast<float>(of_weights.skip);
            if ((h + 1) % share != 0) continue;
            for (std::int64_t at = 0; at < s.seq(); ++at) {
                store(dc, head.q_at(at), s.key_dim, dq.row(at).data());
                store(dc, head.k_at(at), s.key_dim, dk.row(at).data());
            }
        }
}

// One position after the other, by the recurrence itself.
void ssd_cached(const StateShape& s, Src p, Src w, Src bias, Src a_log, Src dt_bias, Src skip,
                const std::int32_t* positions, Dst o, Dst window, float* state, void*) {
    const std::int64_t size = std::int64_t{s.key_dim} * s.value_dim;
    float* row = scratch(Slot::d, s.convolved());
    StateShape one = s;
    one.rows = one.batch = 1;
    one.document_start = nullptr;
    Chunk z;
    for (std::int64_t r = 0; r < s.rows; ++r) {
        convolve_cached(s, p, w, bias, r, positions[r], window, state, row);
        for (std::int64_t h = 0; h < s.value_heads; ++h) {
            read_rows(head_of(one, {row, Type::f32}, p + r * s.projected(), a_log, dt_bias, 0, h), 0, 1, z);
            Map at(state + h * size, s.key_dim, s.value_dim);
            at *= std::exp(z.g[0]);
            at.noalias() += z.k.transpose() * z.u;
            const Matrix out = z.q * at + value(skip, h) * z.v;
            store(o, r * s.values() + h * s.value_dim, s.value_dim, out.data());
        }
    }
}

} // namespace

void add_ssd(Kernels& table) {
    table.ssd = ssd;
    table.ssd_grad = ssd_grad;
    table.ssd_cached = ssd_cached;
}

} // namespace moe::cpu
