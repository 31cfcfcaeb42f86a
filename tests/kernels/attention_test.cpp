// Attention against the plain softmax in double over the whole score matrix; gradients against central differences.
#include "tests/kernels/attention_data.hpp"
#include "tests/kernels/case.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <cmath>
#include <limits>

namespace moe::test {
namespace {

std::string describe(const char* op, const AttentionShape& s, Options o) {
    return fmt::format("{} batch {} seq {}x{} heads {}/{} dims {}/{}{} window {}{}{}{}{} {}", op, s.batch, s.seq_q,
                       s.seq_k, s.heads, s.kv_heads, s.qk_dim, s.v_dim, s.causal ? " causal" : "", s.window,
                       o.packed ? " packed" : "", o.sinks ? " sinks" : "", s.deterministic ? " deterministic" : "",
                       o.documents > 0 ? fmt::format(" documents {}", o.documents) : std::string(), name_of(o.type));
}

Case attention_case(AttentionShape s, Options o) {
    Case out;
    out.name = describe("attention", s, o);
    auto d = attention_data(out.name, s, o);
    out.tolerance = tolerance(o.type);
    out.flops = 2.0 * visible_pairs(*d) * (s.qk_dim + s.v_dim);
    out.bytes = static_cast<double>(d->q.size() + (o.packed ? 0 : d->k.size() + d->v.size()) + d->o.size()) *
                static_cast<double>(size_of(o.type));
    out.call = [d] { d->run(); };
    out.error = [d] {
        return worst({relative_error(d->o, d->forward(d->q.values(), d->k.values(), d->v.values(), d->sinks.values())),
                      relative_error(d->lse, d->lse_reference()) * (d->q.type() == Type::f32 ? 1.0 : 0.5)});
    };
    return out;
}

// The BF16 kernel takes dout . o from the rounded o, which adds an error of o's rounding to the exact gradient: 3x.
Case attention_grad_case(AttentionShape s, Options o) {
    Case out;
    out.name = describe("attention_grad", s, o);
    auto d = attention_data(out.name, s, o);
    out.tolerance = o.type == Type::f32 ? 2.0 * f32_tolerance : 3.0 * bf16_tolerance;
    out.flops = 2.0 * visible_pairs(*d) * (3.0 * s.qk_dim + 2.0 * s.v_dim);
    out.bytes = 2.0 * static_cast<double>(d->q.size() + (o.packed ? 0 : d->k.size() + d->v.size()) + d->o.size()) *
                static_cast<double>(size_of(o.type));
    d->run();
    out.call = [d] { d->run_grad(); };
    out.error = [d] {
        const Vec q = d->q.values(), k = d->k.values(), v = d->v.values(), sinks = d->sinks.values(),
                  dy = d->dout.values();
        double error = 0.0;
        if (d->packed) {
            error =
                relative_error(d->dq, gradient([&](const Vec& at) { return d->forward(at, at, at, sinks); }, q, dy));
        } else {
            error = worst(
                {relative_error(d->dq, gradient([&](const Vec& at) { return d->forward(at, k, v, sinks); }, q, dy)),
                 relative_error(d->dk, gradient([&](const Vec& at) { return d->forward(q, at, v, sinks); }, k, dy)),
                 relative_error(d->dv, gradient([&](const Vec& at) { return d->forward(q, k, at, sinks); }, v, dy))});
        }
        if (!d->with_sinks) return error;
        const Vec dsinks = gradient([&](const Vec& at) { return d->forward(q, k, v, at); }, sinks, dy);
        return worst({error, relative_error(d->dsinks, plus(d->dsinks_before, dsinks))});
    };
    return out;
}

// dq, dk, dv by the gradient's own formulas in double, each as its tensor lies; all of them in dq where packed.
struct Gradients {
    Vec dq, dk, dv;
};

Gradients gradients_by_formula(const AttentionData& d) {
    const AttentionShape& s = d.s;
    const Vec q = d.q.values(), k = d.k.values(), v = d.v.values(), dy = d.dout.values();
    Gradients out{Vec(q.size(), 0.0), Vec(d.packed ? 0 : k.size(), 0.0), Vec(d.packed ? 0 : v.size(), 0.0)};
    Vec &dq = out.dq, &dk = d.packed ? out.dq : out.dk, &dv = d.packed ? out.dq : out.dv;
    const auto qk = static_cast<std::size_t>(s.qk_dim), vd = static_cast<std::size_t>(s.v_dim);
    d.for_each_query(
        q, k,
        [&](std::int64_t h, std::int64_t b, std::int64_t i, const Vec& scores, const std::vector<std::int64_t>& keys) {
            const double lse = d.log_sum(scores, d.sinks.at(h));
            const std::int64_t kv = h / (s.heads / s.kv_heads), row = i * s.batch + b;
            const auto o_at = static_cast<std::size_t>((row * s.heads + h) * s.v_dim);
            const auto q_at = static_cast<std::size_t>(row * s.q_stride + s.q_offset + h * s.qk_dim);
            const auto k_at = [&](std::size_t n) {
                return static_cast<std::size_t>((keys[n] * s.batch + b) * s.k_stride + s.k_offset + kv * s.qk_dim);
            };
            const auto v_at = [&](std::size_t n) {
                return static_cast<std::size_t>((keys[n] * s.batch + b) * s.v_stride + s.v_offset + kv * s.v_dim);
            };
            Vec dp(scores.size(), 0.0);
            double mean = 0.0;
            for (std::size_t n = 0; n < scores.size(); ++n) {
                const double p = std::exp(scores[n] - lse);
                for (std::size_t c = 0; c < vd; ++c) {
                    dp[n] += dy[o_at + c] * v[v_at(n) + c];
                    dv[v_at(n) + c] += p * dy[o_at + c];
                }
                mean += p * dp[n];
            }
            for (std::size_t n = 0; n < scores.size(); ++n) {
                const double ds = std::exp(scores[n] - lse) * (dp[n] - mean) * s.scale;
                for (std::size_t c = 0; c < qk; ++c) {
                    dq[q_at + c] += ds * k[k_at(n) + c];
                    dk[k_at(n) + c] += ds * q[q_at + c];
                }
            }
        });
    return out;
}

// The whole gradient by differences would take minutes at these lengths.
Case attention_grad_long_case(AttentionShape s, Options o) {
    Case out;
    out.name = describe("attention_grad, formulas:", s, o);
    auto d = attention_data(out.name, s, o);
    out.tolerance = o.type == Type::f32 ? 2.0 * f32_tolerance : 3.0 * bf16_tolerance;
    d->run();
    out.call = [d] { d->run_grad(); };
    out.error = [d] {
        const Gradients want = gradients_by_formula(*d);
        if (d->packed) return relative_error(d->dq, want.dq);
        return worst({relative_error(d->dq, want.dq), relative_error(d->dk, want.dk), relative_error(d->dv, want.dv)});
    };
    return out;
}

} // namespace

TEST_CASE("attention and its gradient: small shapes of every kind") {
    for (const Type type : {Type::f32, Type::bf16}) {
        for (const bool sinks : {false, true}) {
            for (const AttentionShape& s :
                 {shape(1, 1, 1, 4, 4, 2, 2), shape(2, 5, 5, 4, 2, 3, 3), shape(3, 6, 6, 4, 4, 4, 2),
                  shape(1, 7, 7, 4, 1, 3, 5, false), shape(2, 7, 7, 4, 2, 3, 3, true, 3), shape(1, 3, 6, 4, 2, 4, 3)}) {
                for (const bool packed : {false, true}) {
                    if (packed && s.seq_q != s.seq_k) continue;
                    check(attention_case(s, {packed, sinks, type}));
                    // One key: the scores' gradient is a difference of equal numbers, of which BF16 leaves nothing.
                    if (s.seq_k == 1 && type == Type::bf16) continue;
                    check(attention_grad_case(s, {packed, sinks, type}));
                }
            }
        }
    }
}

// Sequences of one micro-batch are cut at places of their own.
TEST_CASE("attention and its gradient: documents see only themselves") {
    for (const Type type : {Type::f32, Type::bf16}) {
        for (const bool sinks : {false, true}) {
            for (const AttentionShape& s :
                 {shape(1, 9, 9, 4, 2, 3, 3), shape(2, 12, 12, 2, 1, 4, 2), shape(2, 11, 11, 2, 2, 3, 3, true, 3)}) {
                for (const bool packed : {false, true}) {
                    check(attention_case(s, {packed, sinks, type, 3}));
                    check(attention_grad_case(s, {packed, sinks, type, 3}));
                }
            }
            check(attention_case(shape(2, 300, 300, 2, 1, 4, 3), {false, sinks, type, 5}));
            check(attention_case(shape(1, 530, 530, 1, 1, 2, 2, true, 200), {false, sinks, type, 4}));
        }
        check(attention_case(shape(1, 200, 200, 2, 1, 64, 64), {true, false, type, 4}));
    }
    for (const AttentionShape& s :
         {shape(1, 300, 300, 2, 1, 4, 3), shape(2, 290, 290, 2, 1, 16, 16), shape(1, 530, 530, 1, 1, 2, 2, true, 200)})
        check(attention_grad_long_case(s, {false, false, Type::f32, 5}));
    check(attention_grad_long_case(shape(2, 200, 200, 4, 2, 64, 64), {true, false, Type::bf16, 6}));
}

// Widths that tensor cores take, and their ends: tiles of 128 queries and keys, heads that do not fill one.
TEST_CASE("attention and its gradient: documents of heads as models have them") {
    for (const AttentionShape& s :
         {shape(1, 300, 300, 4, 1, 128, 128), shape(2, 150, 150, 4, 2, 64, 64), shape(1, 200, 200, 2, 2, 192, 128),
          shape(1, 260, 260, 2, 1, 80, 80), shape(1, 140, 140, 2, 1, 96, 64, true, 50), shape(1, 64, 64, 2, 1, 40, 40)})
        for (const bool packed : {false, true}) {
            check(attention_case(s, {packed, packed, Type::bf16, 4}));
            check(attention_grad_long_case(s, {packed, packed, Type::bf16, 4}));
        }
    check(attention_case(shape(1, 130, 300, 2, 1, 128, 128), {false, false, Type::bf16, 3}));
    check(attention_grad_long_case(shape(1, 130, 300, 2, 1, 128, 128), {false, true, Type::bf16, 3}));
}

TEST_CASE("attention and its gradient: heads wider than 256") {
    for (const Type type : {Type::f32, Type::bf16})
        for (const int documents : {0, 3})
            for (const AttentionShape& s : {shape(1, 40, 40, 4, 2, 320, 320), shape(2, 30, 30, 2, 1, 512, 512, true, 9),
                                            shape(1, 9, 33, 2, 1, 512, 260), shape(1, 20, 20, 2, 2, 40, 264)}) {
                check(attention_case(s, {false, documents == 0, type, documents}));
                check(attention_grad_long_case(s, {false, documents == 0, type, documents}));
            }
}

TEST_CASE("attention: sequences over several blocks of queries and keys") {
    for (const Type type : {Type::f32, Type::bf16}) {
        check(attention_case(shape(1, 300, 300, 2, 1, 4, 3), {false, false, type}));
        check(attention_case(shape(2, 270, 270, 1, 1, 3, 2, false), {true, true, type}));
        check(attention_case(shape(1, 530, 530, 1, 1, 2, 2, true, 200), {false, true, type}));
        check(attention_case(shape(1, 129, 400, 1, 1, 2, 2), {false, false, type}));
    }
}

TEST_CASE("attention_grad: a long sequence agrees with the formulas in double") {
    for (const AttentionShape& s : {shape(1, 300, 300, 2, 1, 4, 3), shape(1, 530, 530, 1, 1, 2, 2, true, 200),
                                    shape(1, 130, 400, 1, 1, 3, 2), shape(2, 140, 290, 2, 2, 2, 3, false)})
        check(attention_grad_long_case(s, {}));
}

namespace {

void check_both_orders(AttentionShape s, Options o) {
    for (const bool deterministic : {false, true}) {
        s.deterministic = deterministic;
        check(attention_grad_long_case(s, o));
    }
}

} // namespace

// Shapes whose key heads are work for a whole GPU, where CTAs add to dq in turns: odd numbers of tiles, rectangles,
// shared key heads.
TEST_CASE("attention_grad: many key heads") {
    for (AttentionShape s : {shape(2, 300, 300, 64, 32, 64, 64), shape(1, 260, 260, 64, 64, 128, 128),
                             shape(1, 130, 200, 128, 128, 192, 128), shape(2, 200, 300, 44, 22, 128, 128, false),
                             shape(1, 290, 290, 44, 44, 64, 64, false)}) {
        s.deterministic = true;
        check(attention_grad_long_case(s, {false, false, Type::bf16}));
    }
}

// Heads as wide as models have them, which libraries take in BF16: shared key heads, odd lengths, packed rows, windows.
TEST_CASE("attention and its gradient: heads of whole 16 bytes") {
    for (const bool packed : {false, true}) {
        for (const AttentionShape& s :
             {shape(2, 129, 129, 4, 2, 64, 64), shape(1, 200, 200, 2, 2, 192, 128),
              shape(3, 77, 77, 2, 1, 32, 32, false), shape(2, 150, 150, 4, 1, 64, 64, true, 40),
              shape(1, 65, 65, 2, 1, 128, 128), shape(1, 3, 3, 2, 2, 16, 8), shape(2, 70, 199, 4, 4, 40, 24),
              shape(1, 33, 180, 2, 1, 64, 64, true, 50), shape(1, 90, 64, 2, 2, 16, 16, false),
              shape(1, 70, 70, 1, 1, 256, 256)}) {
            if (packed && s.seq_q != s.seq_k) continue;
            check(attention_case(s, {packed, false, Type::bf16}));
            check_both_orders(s, {packed, false, Type::bf16});
        }
        // Windows that are narrow beside the sequence: its queries are taken in chunks.
        check_both_orders(shape(2, 2100, 2100, 2, 1, 16, 16, true, 100), {packed, false, Type::bf16});
        const AttentionShape s = shape(2, 100, 100, 4, 2, 64, 64, true, 30);
        check(attention_case(s, {packed, true, Type::bf16}));
        check_both_orders(s, {packed, true, Type::bf16});
    }
    check_both_orders(shape(1, 2050, 2300, 2, 1, 16, 8, true, 60), {false, true, Type::bf16});
}

TEST_CASE("attention: queries that see no key yield zeros and no gradient") {
    const AttentionShape s = shape(1, 5, 2, 1, 1, 2, 2); // the first three queries lie before the first key
    auto d = attention_data("attention without keys", s, {});
    d->run();
    d->run_grad();
    CHECK(d->o.values(0, 6) == Vec(6, 0.0));
    CHECK(d->dq.values(0, 6) == Vec(6, 0.0));
    CHECK(std::isinf(d->lse.at(0)));
    CHECK(relative_error(d->o, d->forward(d->q.values(), d->k.values(), d->v.values(), {0.0})) <= f32_tolerance);
    for (const Tensor* t : {&d->dq, &d->dk, &d->dv}) {
        for (const double x : t->values()) CHECK(std::isfinite(x));
    }
}

TEST_CASE("attention: scores beyond the range of exp") {
    AttentionShape s = shape(1, 40, 40, 1, 1, 4, 2);
    s.scale = 300.0;
    auto d = attention_data("attention large", s, {});
    d->run();
    // Scores of about 10^3 carry an FP32 error of 10^-4, which is the relative error of a probability.
    CHECK(relative_error(d->o, d->forward(d->q.values(), d->k.values(), d->v.values(), {0.0})) <= 1e-3);
}

std::vector<Case> attention_benchmarks() {
    std::vector<Case> out;
    for (const Type type : {Type::f32, Type::bf16}) {
        for (const AttentionShape& s : {shape(2, 256, 256, 8, 2, 64, 64), shape(1, 1024, 1024, 8, 2, 64, 64),
                                        shape(1, 1024, 1024, 4, 4, 192, 128), shape(4, 128, 128, 4, 2, 32, 32)}) {
            out.push_back(attention_case(s, {s.qk_dim == s.v_dim, false, type}));
            out.push_back(attention_grad_case(s, {s.qk_dim == s.v_dim, false, type}));
        }
    }
    return out;
}

} // namespace moe::test
