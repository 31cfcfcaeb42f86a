// Rotary embedding, packed and latent, against complex multiplication in double; gradients against central differences.
#include "tests/kernels/case.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <cmath>
#include <complex>

namespace moe::test {
namespace {

// A frequency between its own and its factor-th part, by how far u has come from `low` to `high`.
double scaled(double frequency, double i, const RopeScale& scale) {
    const double u = scale.turns == 0.0 ? i : frequency * scale.turns;
    const double way = (u - scale.low) / (scale.high - scale.low);
    if (way >= 1.0) return frequency;
    return way <= 0.0 ? frequency / scale.factor : way * frequency + (1.0 - way) * frequency / scale.factor;
}

// Turns 2 half values at x[start]: pair i is the complex number (first, second) times magnitude exp(i angle).
void turn(Vec& x, std::size_t start, std::size_t half, bool interleaved, double theta, const RopeScale& scale,
          double position) {
    for (std::size_t i = 0; i < half; ++i) {
        const std::size_t re = start + (interleaved ? 2 * i : i), im = interleaved ? re + 1 : re + half;
        const double own = std::pow(theta, -static_cast<double>(i) / static_cast<double>(half));
        const double angle = position * scaled(own, static_cast<double>(i), scale);
        const std::complex<double> z = std::complex<double>(x[re], x[im]) * std::polar(scale.magnitude, angle);
        x[re] = z.real();
        x[im] = z.imag();
    }
}

std::string scaling(const RopeScale& scale) {
    return scale.factor == 1.0 ? ""
                               : fmt::format(" scaled {} {}..{} {}", scale.factor, scale.low, scale.high, scale.turns);
}

void normalise(Vec& x, std::size_t start, const Vec& w, double eps) {
    double squares = 0.0;
    for (std::size_t j = 0; j < w.size(); ++j) squares += x[start + j] * x[start + j];
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(w.size()) + eps);
    for (std::size_t j = 0; j < w.size(); ++j) x[start + j] *= scale * w[j];
}

double query_factor(const QueryScale& s, double position) {
    return 1.0 + s.beta * std::log(1.0 + std::floor((position + s.offset) / s.positions));
}

struct RopeData {
    RopeShape s;
    Index positions;
    Tensor qkv, wq, wk, out, rstd, dout, dqkv, dwq, dwk;
    Vec dwq_before, dwk_before;
    bool weighted = true; // the norm has weights

    Vec forward(Vec x, const Vec& q_weight, const Vec& k_weight) const {
        const auto d = static_cast<std::size_t>(s.head_dim), heads = static_cast<std::size_t>(s.heads);
        const auto kv = static_cast<std::size_t>(s.kv_heads),
                   width = (heads + kv) * d + kv * (s.v_dim > 0 ? static_cast<std::size_t>(s.v_dim) : d);
        const auto norm = [&](std::size_t at, bool query) {
            if (s.norm) normalise(x, at, !weighted ? Vec(d, 1.0) : query ? q_weight : k_weight, s.eps);
        };
        for (std::size_t r = 0; r < static_cast<std::size_t>(s.tokens); ++r) {
            const double position = positions[r / static_cast<std::size_t>(s.batch)];
            for (std::size_t h = 0; h < heads + kv; ++h) {
                if (!s.norm_behind) norm(r * width + h * d, h < heads);
                turn(x, r * width + h * d, static_cast<std::size_t>(s.rotary_dim / 2), s.interleaved, s.theta, s.scale,
                     position);
                if (s.norm_behind) norm(r * width + h * d, h < heads);
                if (h >= heads) continue;
                for (std::size_t j = 0; j < d; ++j) x[r * width + h * d + j] *= query_factor(s.query_scale, position);
            }
        }
        return x;
    }
};

Case rope_case(bool grad, RopeShape s, Type type, std::int32_t largest_position = 100, bool weighted = true) {
    Case out;
    out.name = fmt::format("rope{} tokens {} batch {} heads {}+{} dim {} rotary {}{}{}{}{}{}{}{} {}",
                           grad ? "_grad" : "", s.tokens, s.batch, s.heads, s.kv_heads, s.head_dim, s.rotary_dim,
                           s.interleaved ? " interleaved" : "", s.norm ? " norm" : "", s.norm_behind ? " behind" : "",
                           weighted ? "" : " without weights", s.v_dim > 0 ? fmt::format(" v {}", s.v_dim) : "",
                           s.query_scale.beta > 0.0 ? " scaled queries" : "", scaling(s.scale), name_of(type));
    Random random(out.name);
    const std::int64_t v_dim = s.v_dim > 0 ? s.v_dim : s.head_dim, d = s.head_dim;
    const std::int64_t n = s.tokens * ((s.heads + s.kv_heads) * d + s.kv_heads * v_dim);
    auto data = std::make_shared<RopeData>(RopeData{s,
                                                    random.indices(s.tokens / s.batch, largest_position),
                                                    random.tensor(type, n),
                                                    random.tensor(type, d),
                                                    random.tensor(type, d),
                                                    Tensor(type, n),
                                                    Tensor(Type::f32, s.tokens * (s.heads + s.kv_heads)),
                                                    random.tensor(type, n),
                                                    Tensor(type, n),
                                                    random.tensor(Type::f32, d),
                                                    random.tensor(Type::f32, d),
                                                    {},
                                                    {}});
    data->weighted = weighted;
    data->dwq_before = data->dwq.values(), data->dwk_before = data->dwk.values();
    out.tolerance = tolerance(type);
    out.flops = (s.norm ? 10.0 : 3.0) * static_cast<double>(n);
    out.bytes = 2.0 * static_cast<double>(n) * static_cast<double>(size_of(type));
    const auto forward = [data] {
        const Src wq = data->weighted ? data->wq.src() : Src{}, wk = data->weighted ? data->wk.src() : Src{};
        table().rope(data->s, data->qkv.src(), data->positions.data(), wq, wk, data->out.dst(), data->rstd.f32(),
                     nullptr);
    };
    if (!grad) {
        out.call = forward;
        out.error = [data] {
            return worst(
                {relative_error(data->out, data->forward(data->qkv.values(), data->wq.values(), data->wk.values())),
                 demand(data->s.norm || data->rstd.untouched(0, data->rstd.size()))});
        };
        return out;
    }
    forward();
    out.call = [data] {
        const Src wq = data->weighted ? data->wq.src() : Src{}, wk = data->weighted ? data->wk.src() : Src{};
        table().rope_grad(data->s, data->dout.src(), data->positions.data(), data->qkv.src(), wq, wk, data->rstd.f32(),
                          data->dqkv.dst(), data->weighted ? data->dwq.f32() : nullptr,
                          data->weighted ? data->dwk.f32() : nullptr, nullptr);
    };
    out.error = [data] {
        const Vec x = data->qkv.values(), wq = data->wq.values(), wk = data->wk.values(), dy = data->dout.values();
        const Vec dx = gradient([&](const Vec& at) { return data->forward(at, wq, wk); }, x, dy);
        const Vec dwq = gradient([&](const Vec& at) { return data->forward(x, at, wk); }, wq, dy);
        const Vec dwk = gradient([&](const Vec& at) { return data->forward(x, wq, at); }, wk, dy);
        return worst({relative_error(data->dqkv, dx), relative_error(data->dwq, plus(data->dwq_before, dwq)),
                      relative_error(data->dwk, plus(data->dwk_before, dwk))});
    };
    return out;
}

RopeShape shape(std::int64_t tokens, std::int64_t batch, int heads, int kv_heads, int head_dim, int rotary,
                bool interleaved, bool norm) {
    RopeShape s;
    s.tokens = tokens, s.batch = batch, s.heads = heads, s.kv_heads = kv_heads, s.head_dim = head_dim,
    s.rotary_dim = rotary;
    s.interleaved = interleaved, s.norm = norm;
    return s;
}

struct MlaData {
    MlaRopeShape s;
    Index positions;
    Tensor q, kv, down, q_out, k, v, dq_out, dk, dv, dq, dkv, ddown;

    // q', k, v one after another, as one function of one input that holds q, kv, kv_down.
    Vec forward(const Vec& in) const {
        const auto n = static_cast<std::size_t>(s.heads), nope = static_cast<std::size_t>(s.nope),
                   rope = static_cast<std::size_t>(s.rope);
        const auto vd = static_cast<std::size_t>(s.v), c = static_cast<std::size_t>(s.kv_lora),
                   rows = static_cast<std::size_t>(s.tokens);
        const std::size_t kv_at = rows * n * (nope + rope), down_at = kv_at + rows * n * (nope + vd);
        Vec queries(in.begin(), in.begin() + static_cast<std::ptrdiff_t>(kv_at)), keys, vals;
        for (std::size_t r = 0; r < rows; ++r) {
            const double position = positions[r / static_cast<std::size_t>(s.batch)];
            for (std::size_t h = 0; h < n; ++h) {
                turn(queries, (r * n + h) * (nope + rope) + nope, rope / 2, s.interleaved, s.theta, s.scale, position);
                for (std::size_t j = 0; j < nope + rope; ++j)
                    queries[(r * n + h) * (nope + rope) + j] *= query_factor(s.query_scale, position);
                const std::size_t from = kv_at + (r * n + h) * (nope + vd), start = keys.size();
                for (std::size_t j = 0; j < nope; ++j) keys.push_back(in[from + j]);
                for (std::size_t j = 0; j < rope; ++j) keys.push_back(in[down_at + r * (c + rope) + c + j]);
                turn(keys, start + nope, rope / 2, s.interleaved, s.theta, s.scale, position);
                for (std::size_t j = 0; j < vd; ++j) vals.push_back(in[from + nope + j]);
            }
        }
        for (const Vec* part : {&keys, &vals}) queries.insert(queries.end(), part->begin(), part->end());
        return queries;
    }
};

Vec joined(const Vec& a, const Vec& b, const Vec& c) {
    Vec out = a;
    for (const Vec* part : {&b, &c}) out.insert(out.end(), part->begin(), part->end());
    return out;
}

Case mla_case(bool grad, MlaRopeShape s, Type type) {
    Case out;
    out.name =
        fmt::format("mla_rope{} tokens {} batch {} heads {} nope {} rope {} v {} lora {}{}{}{} {}", grad ? "_grad" : "",
                    s.tokens, s.batch, s.heads, s.nope, s.rope, s.v, s.kv_lora, s.interleaved ? " interleaved" : "",
                    s.query_scale.beta > 0.0 ? " scaled queries" : "", scaling(s.scale), name_of(type));
    Random random(out.name);
    const std::int64_t q = s.tokens * s.heads * (s.nope + s.rope), kv = s.tokens * s.heads * (s.nope + s.v);
    const std::int64_t down = s.tokens * (s.kv_lora + s.rope), v = s.tokens * s.heads * s.v;
    auto d = std::make_shared<MlaData>(
        MlaData{s, random.indices(s.tokens / s.batch, 1000), random.tensor(type, q), random.tensor(type, kv),
                random.tensor(type, down), Tensor(type, q), Tensor(type, q), Tensor(type, v), random.tensor(type, q),
                random.tensor(type, q), random.tensor(type, v), Tensor(type, q), Tensor(type, kv), Tensor(type, down)});
    out.tolerance = tolerance(type);
    out.flops = 3.0 * static_cast<double>(s.tokens * (s.heads + 1) * s.rope);
    out.bytes = static_cast<double>(3 * q + kv + v + s.tokens * s.rope) * static_cast<double>(size_of(type));
    if (!grad) {
        out.call = [d] {
            table().mla_rope(d->s, d->q.src(), d->kv.src(), d->down.src(), d->positions.data(), d->q_out.dst(),
                             d->k.dst(), d->v.dst(), nullptr);
        };
        out.error = [d] {
            return relative_error(joined(d->q_out.values(), d->k.values(), d->v.values()),
                                  d->forward(joined(d->q.values(), d->kv.values(), d->down.values())));
        };
        return out;
    }
    out.call = [d] {
        table().mla_rope_grad(d->s, d->dq_out.src(), d->dk.src(), d->dv.src(), d->positions.data(), d->dq.dst(),
                              d->dkv.dst(), d->ddown.dst(), nullptr);
    };
    out.error = [d] {
        const Vec in = joined(d->q.values(), d->kv.values(), d->down.values());
        const Vec want = gradient([&](const Vec& at) { return d->forward(at); }, in,
                                  joined(d->dq_out.values(), d->dk.values(), d->dv.values()));
        Vec got = joined(d->dq.values(), d->dkv.values(), d->ddown.values());
        // The latent columns belong to another op: here they have no gradient and must not be written.
        const std::int64_t width = d->s.kv_lora + d->s.rope, start = d->dq.size() + d->dkv.size();
        bool kept = true;
        for (std::int64_t r = 0; r < d->s.tokens; ++r) {
            kept = kept && d->ddown.untouched(r * width, d->s.kv_lora);
            for (std::int64_t j = 0; j < d->s.kv_lora; ++j) got[static_cast<std::size_t>(start + r * width + j)] = 0.0;
        }
        return worst({relative_error(got, want), demand(kept)});
    };
    return out;
}

MlaRopeShape mla(std::int64_t tokens, std::int64_t batch, int heads, int nope, int rope, int v, int lora,
                 bool interleaved = true) {
    MlaRopeShape s;
    s.tokens = tokens, s.batch = batch, s.heads = heads, s.nope = nope, s.rope = rope, s.v = v, s.kv_lora = lora,
    s.interleaved = interleaved;
    return s;
}

} // namespace

TEST_CASE("rope: half-split and interleaved, partial rotation, grouped keys, QK-norm") {
    for (const Type type : {Type::f32, Type::bf16}) {
        for (const bool grad : {false, true}) {
            for (const bool interleaved : {false, true}) {
                for (const bool norm : {false, true}) {
                    check(rope_case(grad, shape(6, 2, 4, 2, 8, 8, interleaved, norm), type));
                    check(rope_case(grad, shape(3, 1, 3, 1, 10, 6, interleaved, norm), type));
                    check(rope_case(grad, shape(3, 3, 1, 1, 6, 2, interleaved, norm), type));
                }
            }
        }
    }
}

TEST_CASE("rope: norms behind the rotation or without weights, narrow values, no rotation, scaled queries") {
    for (const Type type : {Type::f32, Type::bf16}) {
        for (const bool grad : {false, true}) {
            for (const int rotary : {0, 4, 8}) {
                RopeShape s = shape(6, 2, 4, 2, 8, rotary, false, true);
                check(rope_case(grad, s, type, 100, false));
                s.norm_behind = true;
                check(rope_case(grad, s, type));
                s.v_dim = 6;
                s.query_scale = {0.3, 9.0, 1.0};
                check(rope_case(grad, s, type));
                s.norm = s.norm_behind = false;
                check(rope_case(grad, s, type));
            }
            // Shapes of whole packs, where other kernels would go.
            RopeShape wide = shape(6, 2, 4, 2, 64, 64, false, true);
            check(rope_case(grad, wide, type, 100, false));
            wide.norm_behind = true;
            check(rope_case(grad, wide, type));
            wide.norm_behind = false;
            wide.query_scale = {0.3, 9.0, 0.0};
            check(rope_case(grad, wide, type));
            MlaRopeShape m = mla(4, 2, 3, 16, 16, 16, 16);
            m.query_scale = {0.3, 90.0, 0.0};
            check(mla_case(grad, m, type));
        }
    }
}

TEST_CASE("rope: frequencies scaled by pair or by turns, with a magnitude") {
    // Falling with the pair as YaRN has it, rising with the turns as Llama 3 has it, and all of them alike.
    for (const RopeScale scale : {RopeScale{8.0, 3.0, 1.0, 0.0, 1.2}, RopeScale{4.0, 1.0, 4.0, 10.0, 1.0},
                                  RopeScale{2.0, 1e9, 2e9, 0.0, 0.5}}) {
        for (const Type type : {Type::f32, Type::bf16}) {
            for (const bool grad : {false, true}) {
                for (const bool flag : {false, true}) {
                    RopeShape s = shape(4, 2, 4, 2, 12, 10, flag, !flag);
                    s.scale = scale;
                    check(rope_case(grad, s, type));
                    s.norm = flag;
                    check(rope_case(grad, s, type));
                    MlaRopeShape m = mla(4, 2, 3, 6, 8, 5, 7, flag);
                    m.scale = scale;
                    check(mla_case(grad, m, type));
                }
            }
        }
    }
}

TEST_CASE("rope: positions of a long context keep their angle") {
    // The frequencies are FP32 as in the published models, so at 10^5 positions the angle is off by some 1e-3 at most.
    Case c = rope_case(false, shape(8, 1, 2, 1, 64, 64, false, false), Type::f32, 131072);
    c.tolerance = 2e-3;
    check(c);
}

TEST_CASE("rope: in place gives the same numbers") {
    const RopeShape s = shape(4, 2, 2, 1, 8, 8, false, false);
    Random random("rope in place");
    const Index positions = random.indices(2, 50);
    Tensor x = random.tensor(Type::f32, 4 * 32), y(Type::f32, 4 * 32);
    table().rope(s, x.src(), positions.data(), {}, {}, y.dst(), nullptr, nullptr);
    table().rope(s, x.src(), positions.data(), {}, {}, x.dst(), nullptr, nullptr);
    CHECK(x.values() == y.values());
}

TEST_CASE("mla_rope: shared rotary key, unequal widths") {
    for (const Type type : {Type::f32, Type::bf16}) {
        for (const bool grad : {false, true}) {
            check(mla_case(grad, mla(4, 2, 3, 6, 4, 5, 7), type));
            check(mla_case(grad, mla(3, 1, 2, 5, 6, 3, 4, false), type));
            check(mla_case(grad, mla(1, 1, 1, 1, 2, 1, 1), type));
        }
    }
}

std::vector<Case> rope_benchmarks() {
    std::vector<Case> out;
    for (const Type type : {Type::f32, Type::bf16}) {
        for (const bool grad : {false, true}) {
            out.push_back(rope_case(grad, shape(1024, 2, 16, 4, 64, 64, false, false), type));
            out.push_back(rope_case(grad, shape(1024, 2, 16, 4, 64, 64, false, true), type));
            out.push_back(mla_case(grad, mla(1024, 2, 16, 64, 32, 64, 256), type));
        }
    }
    return out;
}

} // namespace moe::test
