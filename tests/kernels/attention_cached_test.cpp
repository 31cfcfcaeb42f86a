// Attention over cached keys against the plain softmax in double: rows that come a few at a time see all before them.
#include "tests/kernels/case.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace moe::test {
namespace {

struct Shape {
    int heads, kv_heads, qk, v;
    std::int64_t window;
    bool packed, sinks;
};

// Rows of one sequence as one call or another gives them, and what they shall see.
struct Rows {
    AttentionShape s;
    Shape of;
    std::int64_t total;
    Tensor q, k, v, sinks, k_cache, v_cache;

    Vec expected() const {
        Vec out;
        for (std::int64_t i = 0; i < total; ++i)
            for (std::int64_t h = 0; h < of.heads; ++h) {
                const std::int64_t kv = h / (of.heads / of.kv_heads);
                const std::int64_t from = of.window > 0 ? std::max<std::int64_t>(0, i + 1 - of.window) : 0;
                Vec scores;
                double best = of.sinks ? sinks.at(h) : -std::numeric_limits<double>::infinity();
                for (std::int64_t j = from; j <= i; ++j) {
                    double dot = 0.0;
                    for (std::int64_t c = 0; c < of.qk; ++c)
                        dot += q.at(i * s.q_stride + s.q_offset + h * of.qk + c) *
                               k.at(j * s.k_stride + s.k_offset + kv * of.qk + c);
                    scores.push_back(dot * s.scale);
                    best = std::max(best, scores.back());
                }
                double sum = of.sinks ? std::exp(sinks.at(h) - best) : 0.0;
                for (double& score : scores) sum += score = std::exp(score - best);
                for (std::int64_t c = 0; c < of.v; ++c) {
                    double value = 0.0;
                    for (std::int64_t j = from; j <= i; ++j)
                        value += scores[static_cast<std::size_t>(j - from)] / sum *
                                 v.at(j * s.v_stride + s.v_offset + kv * of.v + c);
                    out.push_back(value);
                }
            }
        return out;
    }
    static Tensor part(const Tensor& whole, std::int64_t from, std::int64_t count) {
        return Tensor(whole.type(), whole.values(from, count));
    }
    // All rows, so many at a time.
    double error(std::int64_t at_once) {
        Vec got;
        for (std::int64_t i = 0; i < total; i += at_once) {
            const std::int64_t n = std::min(at_once, total - i);
            Index positions;
            for (std::int64_t r = 0; r < n; ++r) positions.push_back(static_cast<std::int32_t>(i + r));
            const Tensor queries = part(q, i * s.q_stride, n * s.q_stride),
                         keys = part(k, i * s.k_stride, n * s.k_stride),
                         values = part(v, i * s.v_stride, n * s.v_stride);
            Tensor out(q.type(), n * of.heads * of.v);
            s.seq_q = n;
            table().attention_cached(s, queries.src(), (of.packed ? queries : keys).src(),
                                     (of.packed ? queries : values).src(), positions.data(),
                                     of.sinks ? sinks.src() : Src{}, out.dst(), k_cache.dst(), v_cache.dst(), nullptr);
            for (const double value : out.values()) got.push_back(value);
        }
        return relative_error(got, expected());
    }
};

Case cached_case(const Shape& of, Type type, std::int64_t at_once) {
    constexpr std::int64_t total = 41, room = 48;
    Case out;
    out.name =
        fmt::format("attention_cached heads {}/{} dims {}/{} window {}{}{} {} at once {}", of.heads, of.kv_heads, of.qk,
                    of.v, of.window, of.packed ? " packed" : "", of.sinks ? " sinks" : "", at_once, name_of(type));
    Random random(out.name);
    AttentionShape s;
    s.seq_k = room, s.heads = of.heads, s.kv_heads = of.kv_heads, s.qk_dim = of.qk, s.v_dim = of.v;
    s.window = of.window, s.scale = 1.0 / std::sqrt(of.qk);
    s.q_stride = of.heads * of.qk, s.k_stride = of.kv_heads * of.qk, s.v_stride = of.kv_heads * of.v;
    const std::int64_t keys = room * s.k_stride, values = room * s.v_stride;
    if (of.packed) {
        const std::int64_t width = s.q_stride + s.k_stride + s.v_stride;
        s.k_offset = s.q_stride, s.v_offset = s.q_stride + s.k_stride;
        s.q_stride = s.k_stride = s.v_stride = width;
    }
    auto rows =
        std::make_shared<Rows>(Rows{s, of, total, random.tensor(type, total * s.q_stride),
                                    random.tensor(type, total * s.k_stride), random.tensor(type, total * s.v_stride),
                                    random.tensor(type, of.heads), Tensor(type, keys), Tensor(type, values)});
    if (of.packed) rows->k = rows->q, rows->v = rows->q;
    out.tolerance = tolerance(type);
    out.call = [] {};
    // Caches beyond the last row stay as they were.
    out.error = [rows, at_once, keys, values] {
        const double error = rows->error(at_once);
        const std::int64_t key_row = keys / room, value_row = values / room;
        return worst({error, demand(rows->k_cache.untouched(total * key_row, (room - total) * key_row)),
                      demand(rows->v_cache.untouched(total * value_row, (room - total) * value_row))});
    };
    return out;
}

} // namespace

TEST_CASE("attention over cached keys is attention, however rows come") {
    for (const Type type : {Type::f32, Type::bf16})
        for (const std::int64_t at_once : {1, 5, 41}) {
            check(cached_case({4, 2, 16, 16, 0, true, false}, type, at_once));
            check(cached_case({4, 4, 24, 16, 0, false, false}, type, at_once));
            check(cached_case({8, 2, 64, 64, 7, true, true}, type, at_once));
            check(cached_case({2, 1, 192, 128, 0, false, true}, type, at_once));
            check(cached_case({1, 1, 3, 5, 40, false, false}, type, at_once));
            check(cached_case({2, 1, 512, 512, 0, false, true}, type, at_once));
            check(cached_case({2, 2, 300, 40, 7, true, false}, type, at_once));
        }
}

} // namespace moe::test
