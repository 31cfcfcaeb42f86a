// Softmax attention over cached keys and values, which every row joins at its position.
#include "kernels/cpu/rows.hpp"

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <limits>

namespace moe::cpu {
namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using In = Eigen::Map<const Matrix>;
using Vector = Eigen::Map<Eigen::VectorXf>;
using ConstVector = Eigen::Map<const Eigen::VectorXf>;

std::int64_t stride_or(std::int64_t stride, std::int64_t columns) { return stride != 0 ? stride : columns; }

void attention_cached(const AttentionShape& s, Src q, Src k, Src v, const std::int32_t* positions, Src sinks, Dst o,
                      Dst k_cache, Dst v_cache, void*) {
    const std::int64_t share = s.heads / s.kv_heads, keys = std::int64_t{s.kv_heads} * s.qk_dim,
                       values = std::int64_t{s.kv_heads} * s.v_dim;
    const std::int64_t q_stride = stride_or(s.q_stride, std::int64_t{s.heads} * s.qk_dim),
                       k_stride = stride_or(s.k_stride, keys), v_stride = stride_or(s.v_stride, values);
    for (std::int64_t i = 0; i < s.seq_q; ++i) {
        move(k, i * k_stride + s.k_offset, k_cache, positions[i] * keys, keys);
        move(v, i * v_stride + s.v_offset, v_cache, positions[i] * values, values);
    }
    const Src cached_k{k_cache.data, k_cache.type}, cached_v{v_cache.data, v_cache.type};
    float* query = scratch(Slot::c, s.qk_dim);
    float* out = scratch(Slot::e, s.v_dim);
    for (std::int64_t i = 0; i < s.seq_q; ++i) {
        const std::int64_t end = positions[i] + 1, in_window = s.window > 0 ? end - s.window : 0,
                           in_chunk = s.chunk > 0 ? positions[i] / s.chunk * s.chunk : 0,
                           from = std::max<std::int64_t>({0, in_window, in_chunk});
        const std::int64_t n = end - from;
        float* logits = scratch(Slot::d, n);
        for (std::int64_t h = 0; h < s.heads; ++h) {
            if (h % share == 0) {
                float *head_k = scratch(Slot::a, n * s.qk_dim), *head_v = scratch(Slot::b, n * s.v_dim);
                for (std::int64_t j = 0; j < n; ++j) {
                    load(cached_k, (from + j) * keys + h / share * s.qk_dim, s.qk_dim, head_k + j * s.qk_dim);
                    load(cached_v, (from + j) * values + h / share * s.v_dim, s.v_dim, head_v + j * s.v_dim);
                }
            }
            const In head_k(scratch(Slot::a, n * s.qk_dim), n, s.qk_dim),
                head_v(scratch(Slot::b, n * s.v_dim), n, s.v_dim);
            load(q, i * q_stride + s.q_offset + h * s.qk_dim, s.qk_dim, query);
            Vector p(logits, n);
            p.noalias() = head_k * ConstVector(query, s.qk_dim) * static_cast<float>(s.scale);
            const float sink = sinks.data != nullptr ? value(sinks, h) : -std::numeric_limits<float>::infinity();
            const float most = std::max(p.maxCoeff(), sink);
            p = (p.array() - most).exp();
            const float sum = p.sum() + std::exp(sink - most);
            Vector result(out, s.v_dim);
            result.noalias() = head_v.transpose() * p / sum;
            store(o, (i * s.heads + h) * s.v_dim, s.v_dim, out);
        }
    }
}

} // namespace

void add_attention_cached(Kernels& table) { table.attention_cached = attention_cached; }

} // namespace moe::cpu
