// Operands of an attention case and its gradient, with the plain softmax in double as reference.
#pragma once

#include "tests/kernels/case.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace moe::test {

// q, k, v as the kernel sees them: three tensors, or three parts of one packed row.
struct AttentionData {
    AttentionShape s;
    bool packed, with_sinks;
    std::int64_t q_elements, k_elements, v_elements;
    Tensor q, k, v, sinks, o, lse, dout, dq, dk, dv, dsinks;
    Vec dsinks_before;
    Index starts; // [seq_q * batch], empty: no documents

    bool sees(std::int64_t b, std::int64_t i, std::int64_t j) const {
        const std::int64_t at = i + s.seq_k - s.seq_q;
        if (!starts.empty() && j < starts[static_cast<std::size_t>(i * s.batch + b)]) return false;
        return (!s.causal || j <= at) && (s.window == 0 || j > at - s.window);
    }
    // Calls visit(head, sequence, query, scores of the visible keys, their numbers) on inputs q, k.
    template <class Visit>
    void for_each_query(const Vec& qs, const Vec& ks, Visit visit) const {
        for (std::int64_t h = 0; h < s.heads; ++h) {
            const std::int64_t kv = h / (s.heads / s.kv_heads);
            for (std::int64_t b = 0; b < s.batch; ++b) {
                for (std::int64_t i = 0; i < s.seq_q; ++i) {
                    Vec scores;
                    std::vector<std::int64_t> keys;
                    const std::int64_t q_at = (i * s.batch + b) * s.q_stride + s.q_offset + h * s.qk_dim;
                    for (std::int64_t j = 0; j < s.seq_k; ++j) {
                        if (!sees(b, i, j)) continue;
                        const std::int64_t k_at = (j * s.batch + b) * s.k_stride + s.k_offset + kv * s.qk_dim;
                        double dot = 0.0;
                        for (std::int64_t c = 0; c < s.qk_dim; ++c) {
                            dot += qs[static_cast<std::size_t>(q_at + c)] * ks[static_cast<std::size_t>(k_at + c)];
                        }
                        scores.push_back(dot * s.scale);
                        keys.push_back(j);
                    }
                    visit(h, b, i, scores, keys);
                }
            }
        }
    }
    double log_sum(const Vec& scores, double sink) const {
        double best = with_sinks ? sink : -std::numeric_limits<double>::infinity();
        for (const double x : scores) best = std::max(best, x);
        if (std::isinf(best)) return best;
        double sum = with_sinks ? std::exp(sink - best) : 0.0;
        for (const double x : scores) sum += std::exp(x - best);
        return best + std::log(sum);
    }
    Vec forward(const Vec& qs, const Vec& ks, const Vec& vs, const Vec& sink) const {
        Vec out(static_cast<std::size_t>(s.batch * s.seq_q * s.heads * s.v_dim), 0.0);
        for_each_query(qs, ks,
                       [&](std::int64_t h, std::int64_t b, std::int64_t i, const Vec& scores,
                           const std::vector<std::int64_t>& keys) {
                           const double lse_at = log_sum(scores, sink[static_cast<std::size_t>(h)]);
                           for (std::size_t n = 0; n < scores.size(); ++n) {
                               const double p = std::exp(scores[n] - lse_at);
                               const std::int64_t kv = h / (s.heads / s.kv_heads);
                               const std::int64_t v_at =
                                   (keys[n] * s.batch + b) * s.v_stride + s.v_offset + kv * s.v_dim;
                               for (std::int64_t c = 0; c < s.v_dim; ++c) {
                                   out[static_cast<std::size_t>(((i * s.batch + b) * s.heads + h) * s.v_dim + c)] +=
                                       p * vs[static_cast<std::size_t>(v_at + c)];
                               }
                           }
                       });
        return out;
    }
    Vec lse_reference() const {
        Vec out(static_cast<std::size_t>(s.heads * s.batch * s.seq_q));
        for_each_query(q.values(), k.values(),
                       [&](std::int64_t h, std::int64_t b, std::int64_t i, const Vec& scores, const auto&) {
                           out[static_cast<std::size_t>(h * s.batch * s.seq_q + i * s.batch + b)] =
                               log_sum(scores, sinks.at(h));
                       });
        return out;
    }
    void run() {
        table().attention(s, q.src(), (packed ? q : k).src(), (packed ? q : v).src(), with_sinks ? sinks.src() : Src{},
                          o.dst(), lse.f32(), nullptr);
    }
    void run_grad() {
        table().attention_grad(s, dout.src(), q.src(), (packed ? q : k).src(), (packed ? q : v).src(), o.src(),
                               lse.f32(), with_sinks ? sinks.src() : Src{}, dq.dst(), (packed ? dq : dk).dst(),
                               (packed ? dq : dv).dst(), with_sinks ? dsinks.f32() : nullptr, nullptr);
    }
};

struct Options {
    bool packed = false, sinks = false;
    Type type = Type::f32;
    int documents = 0; // of each sequence, 0: it is not masked
};

inline AttentionShape shape(std::int64_t batch, std::int64_t seq_q, std::int64_t seq_k, int heads, int kv_heads, int qk,
                            int v, bool causal = true, std::int64_t window = 0) {
    AttentionShape s;
    s.batch = batch, s.seq_q = seq_q, s.seq_k = seq_k, s.heads = heads, s.kv_heads = kv_heads, s.qk_dim = qk,
    s.v_dim = v;
    s.causal = causal, s.window = window, s.scale = 1.0 / std::sqrt(qk);
    s.q_stride = heads * qk, s.k_stride = kv_heads * qk, s.v_stride = kv_heads * v;
    return s;
}

inline std::shared_ptr<AttentionData> attention_data(const std::string& name, AttentionShape s, Options o) {
    Random random(name);
    if (o.packed) {
        const std::int64_t width = s.q_stride + s.k_stride + s.v_stride;
        s.k_offset = s.q_stride, s.v_offset = s.q_stride + s.k_stride;
        s.q_stride = s.k_stride = s.v_stride = width;
    }
    const std::int64_t nq = s.batch * s.seq_q * s.q_stride, nk = s.batch * s.seq_k * s.k_stride,
                       nv = s.batch * s.seq_k * s.v_stride;
    const std::int64_t no = s.batch * s.seq_q * s.heads * s.v_dim;
    const Type t = o.type;
    auto d = std::make_shared<AttentionData>(AttentionData{s,
                                                           o.packed,
                                                           o.sinks,
                                                           nq,
                                                           nk,
                                                           nv,
                                                           random.tensor(t, nq),
                                                           random.tensor(t, nk),
                                                           random.tensor(t, nv),
                                                           random.tensor(t, s.heads),
                                                           Tensor(t, no),
                                                           Tensor(Type::f32, s.heads * s.batch * s.seq_q),
                                                           random.tensor(t, no),
                                                           Tensor(t, nq),
                                                           Tensor(t, nk),
                                                           Tensor(t, nv),
                                                           random.tensor(Type::f32, s.heads),
                                                           {},
                                                           {}});
    if (o.documents > 0) {
        d->starts.resize(static_cast<std::size_t>(s.seq_q * s.batch), 0);
        for (std::int64_t b = 0; b < s.batch; ++b)
            for (int cut = 1; cut < o.documents; ++cut)
                for (std::int64_t i = random.below(static_cast<std::int32_t>(s.seq_q)), from = i; i < s.seq_q; ++i) {
                    std::int32_t& start = d->starts[static_cast<std::size_t>(i * s.batch + b)];
                    start = std::max(start, static_cast<std::int32_t>(from + s.seq_k - s.seq_q));
                }
        d->s.document_start = d->starts.data();
    }
    if (o.packed) d->k = d->q, d->v = d->q;
    d->dsinks_before = d->dsinks.values();
    return d;
}

inline double visible_pairs(const AttentionData& d) {
    double pairs = 0.0;
    for (std::int64_t i = 0; i < d.s.seq_q; ++i) {
        for (std::int64_t j = 0; j < d.s.seq_k; ++j)
            for (std::int64_t b = 0; b < d.s.batch; ++b) pairs += d.sees(b, i, j) ? 1.0 : 0.0;
    }
    return pairs * d.s.heads;
}

} // namespace moe::test
