// Softmax attention by blocks of queries and keys with a running softmax, so that scratch never grows with their
// product.
//
// The running softmax and the recomputation of its probabilities from the saved log-sum-exp follow FlashAttention
// (Dao et al., arXiv:2205.14135, algorithms 1 and 4).
#include "kernels/cpu/rows.hpp"

#include <Eigen/Core>

#include <cmath>
#include <limits>

namespace moe::cpu {
namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using In = Eigen::Map<const Matrix>;
using Out = Eigen::Map<Matrix>;
using Row = Eigen::Map<Eigen::ArrayXf>;
using ConstRow = Eigen::Map<const Eigen::ArrayXf>;

constexpr std::int64_t block_q = 64, block_k = 256;
constexpr float minus_infinity = -std::numeric_limits<float>::infinity();

// The rows of one sequence and head: row i of the head starts at element start + i * step.
struct Head {
    std::int64_t start, step, dim;
};
struct Sizes {
    AttentionShape s;
    std::int64_t q_stride, k_stride, v_stride;
    explicit Sizes(const AttentionShape& shape)
        : s(shape),
          q_stride(s.q_stride != 0 ? s.q_stride : std::int64_t{s.heads} * s.qk_dim),
          k_stride(s.k_stride != 0 ? s.k_stride : std::int64_t{s.kv_heads} * s.qk_dim),
          v_stride(s.v_stride != 0 ? s.v_stride : std::int64_t{s.kv_heads} * s.v_dim) {}

    Head q(std::int64_t b, std::int64_t h) const {
        return {b * q_stride + s.q_offset + h * s.qk_dim, s.batch * q_stride, s.qk_dim};
    }
    Head k(std::int64_t b, std::int64_t h) const {
        return {b * k_stride + s.k_offset + h * s.qk_dim, s.batch * k_stride, s.qk_dim};
    }
    Head v(std::int64_t b, std::int64_t h) const {
        return {b * v_stride + s.v_offset + h * s.v_dim, s.batch * v_stride, s.v_dim};
    }
    Head o(std::int64_t b, std::int64_t h) const {
        const std::int64_t stride = std::int64_t{s.heads} * s.v_dim;
        return {b * stride + h * s.v_dim, s.batch * stride, s.v_dim};
    }
    std::int64_t lse(std::int64_t b, std::int64_t h, std::int64_t i) const { return (h * s.seq_q + i) * s.batch + b; }
    // Keys [first, last) that query i of sequence b sees; both grow with i.
    std::int64_t last(std::int64_t i) const { return s.causal ? keys_before(i, 1) : s.seq_k; }
    std::int64_t first(std::int64_t b, std::int64_t i) const {
        const std::int64_t seen = s.window > 0 ? keys_before(i, 1 - s.window) : 0;
        return s.document_start != nullptr ? std::max(seen, keys_below(document(b, i))) : seen;
    }
    // Queries of a block from i on: block_q of them, less where a document or the sequence ends before, so that a
    // document's blocks are those that it has alone.
    std::int64_t block(std::int64_t b, std::int64_t i) const {
        std::int64_t m = std::min(block_q, s.seq_q - i);
        if (s.document_start == nullptr) return m;
        while (document(b, i + m - 1) != document(b, i)) --m;
        return m;
    }

private:
    std::int64_t document(std::int64_t b, std::int64_t i) const { return s.document_start[i * s.batch + b]; }
    // Keys at positions below query i's plus `shift`.
    std::int64_t keys_before(std::int64_t i, std::int64_t shift) const {
        if (!s.spread) return keys_below(i + s.seq_k - s.seq_q + shift);
        const std::int64_t run = s.seq_q / 2;
        return keys_below((i < run ? s.q_start[0] + i : s.q_start[1] + i - run) + shift);
    }
    std::int64_t keys_below(std::int64_t end) const {
        if (!s.spread) return std::clamp<std::int64_t>(end, 0, s.seq_k);
        return std::clamp<std::int64_t>(end - s.k_start[0], 0, s.seq_k / 2) +
               std::clamp<std::int64_t>(end - s.k_start[1], 0, s.seq_k / 2);
    }
};

void gather(Src x, const Head& head, std::int64_t row, std::int64_t rows, float* y) {
    for (std::int64_t i = 0; i < rows; ++i) load(x, head.start + (row + i) * head.step, head.dim, y + i * head.dim);
}
void scatter(Dst x, const Head& head, std::int64_t row, std::int64_t rows, const float* y) {
    for (std::int64_t i = 0; i < rows; ++i) store(x, head.start + (row + i) * head.step, head.dim, y + i * head.dim);
}

struct Span { // visible keys of a query inside a block, relative to the block's first key
    std::int64_t from, to;
};
Span visible(const Sizes& z, std::int64_t b, std::int64_t i, std::int64_t key, std::int64_t keys) {
    const std::int64_t from = std::clamp<std::int64_t>(z.first(b, i) - key, 0, keys);
    return {from, std::clamp<std::int64_t>(z.last(i) - key, from, keys)};
}

// One row's step of the running softmax: logits become probabilities relative to the new maximum; returns the factor
// that brings what was summed before to that maximum. The largest logit that was ever seen is kept in `largest`.
float soften(float* logits, std::int64_t keys, Span see, float& max, float& sum, float& largest) {
    const std::int64_t n = see.to - see.from;
    float factor = 1.0f;
    if (n > 0) {
        Row row(logits + see.from, n);
        const float most = row.maxCoeff(), best = std::max(max, most);
        largest = std::max(largest, most);
        factor = max == minus_infinity ? 0.0f : std::exp(max - best);
        row = (row - best).exp();
        sum = sum * factor + row.sum();
        max = best;
    }
    std::fill_n(logits, see.from, 0.0f);
    std::fill_n(logits + see.to, keys - see.to, 0.0f);
    return factor;
}

struct Keys { // keys and values of one sequence and key head, contiguous in FP32
    float *k, *v;
};

// The arguments o and lse hold the sums before: a softmax over the sink alone, or over the keys of an earlier call.
// Returns the largest logit.
float attend_block(const Sizes& z, const Keys& kv, const float* q, std::int64_t b, std::int64_t i, std::int64_t m,
                   float* o, float* lse) {
    const AttentionShape& s = z.s;
    float* logits = scratch(Slot::d, block_q * block_k);
    float max[block_q], sum[block_q], largest = minus_infinity;
    std::copy_n(lse, m, max);
    for (std::int64_t r = 0; r < m; ++r) sum[r] = lse[r] == minus_infinity ? 0.0f : 1.0f;
    Out out(o, m, s.v_dim);
    const std::int64_t end = z.last(i + m - 1);
    for (std::int64_t j = z.first(b, i); j < end; j += block_k) {
        const std::int64_t n = std::min(block_k, end - j);
        Out p(logits, m, n);
        p.noalias() = In(q, m, s.qk_dim) * In(kv.k + j * s.qk_dim, n, s.qk_dim).transpose();
        for (std::int64_t r = 0; r < m; ++r) {
            const float factor = soften(logits + r * n, n, visible(z, b, i + r, j, n), max[r], sum[r], largest);
            if (factor != 1.0f) out.row(r) *= factor;
        }
        out.noalias() += p * In(kv.v + j * s.v_dim, n, s.v_dim);
    }
    for (std::int64_t r = 0; r < m; ++r) { // A query that sees nothing yields zeros.
        if (sum[r] > 0.0f) out.row(r) /= sum[r];
        lse[r] = sum[r] > 0.0f ? max[r] + std::log(sum[r]) : minus_infinity;
    }
    return largest;
}

void attention(const AttentionShape& s, Src q, Src k, Src v, Src sinks, Dst o, float* lse, void*) {
    const Sizes z(s);
    const Keys kv{scratch(Slot::a, s.seq_k * s.qk_dim), scratch(Slot::b, s.seq_k * s.v_dim)};
    float* queries = scratch(Slot::c, block_q * s.qk_dim);
    float* out = scratch(Slot::e, block_q * s.v_dim);
    float block_lse[block_q];
    const std::int64_t share = s.heads / s.kv_heads;
    for (std::int64_t b = 0; b < s.batch; ++b) {
        for (std::int64_t h = 0; h < s.heads; ++h) {
            if (h % share == 0) {
                gather(k, z.k(b, h / share), 0, s.seq_k, kv.k);
                gather(v, z.v(b, h / share), 0, s.seq_k, kv.v);
            }
            const float sink = sinks.data != nullptr ? value(sinks, h) : minus_infinity;
            for (std::int64_t i = 0, m = 0; i < s.seq_q; i += m) {
                m = z.block(b, i);
                if (s.merge && z.last(i + m - 1) <= z.first(b, i)) continue; // The query's earlier sums are complete.
                gather(q, z.q(b, h), i, m, queries);
                Row(queries, m * s.qk_dim) *= static_cast<float>(s.scale);
                std::fill_n(block_lse, m, sink);
                Row(out, m * s.v_dim).setZero();
                if (s.merge) {
                    gather(o, z.o(b, h), i, m, out);
                    for (std::int64_t r = 0; r < m; ++r) block_lse[r] = lse[z.lse(b, h, i + r)];
                }
                const float largest = attend_block(z, kv, queries, b, i, m, out, block_lse);
                if (s.largest != nullptr) s.largest[h] = std::max(s.largest[h], largest);
                scatter(o, z.o(b, h), i, m, out);
                for (std::int64_t r = 0; r < m; ++r) lse[z.lse(b, h, i + r)] = block_lse[r];
            }
        }
    }
}

struct QueryBlock { // block of m queries of sequence b from i on, contiguous in FP32; q is scaled
    std::int64_t b, i, m;
    float *q, *dout, *dq;
    float lse[block_q], along[block_q]; // along: dout . o of each row
};

// Adds the block's part to dk and dv of all keys it sees and sums its own dq (without the scale).
void attend_block_grad(const Sizes& z, const Keys& kv, QueryBlock& block, float* dk, float* dv) {
    const AttentionShape& s = z.s;
    const std::int64_t m = block.m;
    float* prob = scratch(Slot::f, block_q * block_k);
    float* dprob = scratch(Slot::g, block_q * block_k);
    const In q(block.q, m, s.qk_dim), dout(block.dout, m, s.v_dim);
    Out dq(block.dq, m, s.qk_dim);
    dq.setZero();
    const std::int64_t end = z.last(block.i + m - 1);
    for (std::int64_t j = z.first(block.b, block.i); j < end; j += block_k) {
        const std::int64_t n = std::min(block_k, end - j);
        const In key(kv.k + j * s.qk_dim, n, s.qk_dim), val(kv.v + j * s.v_dim, n, s.v_dim);
        Out p(prob, m, n), dp(dprob, m, n);
        p.noalias() = q * key.transpose();
        dp.noalias() = dout * val.transpose();
        for (std::int64_t r = 0; r < m; ++r) {
            const Span see = visible(z, block.b, block.i + r, j, n);
            Row row(prob + r * n + see.from, see.to - see.from), drow(dprob + r * n + see.from, see.to - see.from);
            row = (row - block.lse[r]).exp();
            drow = row * (drow - block.along[r]);
            for (float* x : {prob + r * n, dprob + r * n}) {
                std::fill_n(x, see.from, 0.0f);
                std::fill_n(x + see.to, n - see.to, 0.0f);
            }
        }
        Out(dv + j * s.v_dim, n, s.v_dim).noalias() += p.transpose() * dout;
        Out(dk + j * s.qk_dim, n, s.qk_dim).noalias() += dp.transpose() * q;
        dq.noalias() += dp * key;
    }
}

// Fills the block, with dout . o of each row.
void gather_block(const Sizes& z, std::int64_t h, Src q, Src dout, Src o, const float* lse, QueryBlock& block,
                  float* o_row) {
    const std::int64_t b = block.b;
    gather(q, z.q(b, h), block.i, block.m, block.q);
    Row(block.q, block.m * z.s.qk_dim) *= static_cast<float>(z.s.scale);
    const Head head = z.o(b, h);
    gather(dout, head, block.i, block.m, block.dout);
    for (std::int64_t r = 0; r < block.m; ++r) {
        gather(o, head, block.i + r, 1, o_row);
        block.along[r] = (ConstRow(o_row, head.dim) * ConstRow(block.dout + r * head.dim, head.dim)).sum();
        block.lse[r] = lse[z.lse(b, h, block.i + r)];
    }
}

void attention_grad(const AttentionShape& s, Src dout, Src q, Src k, Src v, Src o, const float* lse, Src sinks, Dst dq,
                    Dst dk, Dst dv, float* dsinks, void*) {
    const Sizes z(s);
    const Keys kv{scratch(Slot::a, s.seq_k * s.qk_dim), scratch(Slot::b, s.seq_k * s.v_dim)};
    const std::int64_t key_elements = s.seq_k * s.qk_dim, value_elements = s.seq_k * s.v_dim;
    float* key_grad = scratch(Slot::c, key_elements + value_elements);
    float* value_grad = key_grad + key_elements;
    QueryBlock block{};
    block.q = scratch(Slot::d, block_q * s.qk_dim);
    block.dout = scratch(Slot::e, block_q * s.v_dim);
    block.dq = scratch(Slot::h, block_q * s.qk_dim);
    float* o_row = scratch(Slot::i, s.v_dim);
    const std::int64_t share = s.heads / s.kv_heads;
    for (std::int64_t b = 0; b < s.batch; ++b) {
        for (std::int64_t h = 0; h < s.heads; ++h) {
            if (h % share == 0) {
                gather(k, z.k(b, h / share), 0, s.seq_k, kv.k);
                gather(v, z.v(b, h / share), 0, s.seq_k, kv.v);
                std::fill_n(key_grad, key_elements + value_elements, 0.0f);
            }
            for (block.b = b, block.i = 0; block.i < s.seq_q; block.i += block.m) {
                block.m = z.block(b, block.i);
                gather_block(z, h, q, dout, o, lse, block, o_row);
                attend_block_grad(z, kv, block, key_grad, value_grad);
                Row(block.dq, block.m * s.qk_dim) *= static_cast<float>(s.scale);
                if (s.merge) {
                    gather(dq, z.q(b, h), block.i, block.m, block.q); // The block's queries have been read.
                    Row(block.dq, block.m * s.qk_dim) += Row(block.q, block.m * s.qk_dim);
                }
                scatter(dq, z.q(b, h), block.i, block.m, block.dq);
                for (std::int64_t r = 0; sinks.data != nullptr && r < block.m; ++r) {
                    dsinks[h] -= std::exp(value(sinks, h) - block.lse[r]) * block.along[r];
                }
            }
            if ((h + 1) % share == 0) { // At a key head's last query head, dk is whole; q carried the scale.
                scatter(dk, z.k(b, h / share), 0, s.seq_k, key_grad);
                scatter(dv, z.v(b, h / share), 0, s.seq_k, value_grad);
            }
        }
    }
}

} // namespace

void add_attention(Kernels& table) {
    table.attention = attention;
    table.attention_grad = attention_grad;
}

} // namespace moe::cpu
