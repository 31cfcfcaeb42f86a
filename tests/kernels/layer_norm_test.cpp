// LayerNorm, norms over all heads, factors and bounds against double references; gradients against central differences.
#include "tests/kernels/case.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace moe::test {
namespace {

constexpr double eps = 1e-6;

Vec layer_norm(const Vec& x, const Vec& w, const Vec& b) {
    Vec y(x.size());
    const auto cols = static_cast<double>(w.size());
    for (std::size_t row = 0; row < x.size(); row += w.size()) {
        double mean = 0.0, squares = 0.0;
        for (std::size_t j = 0; j < w.size(); ++j) mean += x[row + j] / cols;
        for (std::size_t j = 0; j < w.size(); ++j) squares += (x[row + j] - mean) * (x[row + j] - mean);
        const double scale = 1.0 / std::sqrt(squares / cols + eps);
        for (std::size_t j = 0; j < w.size(); ++j) y[row + j] = (x[row + j] - mean) * scale * w[j] + b[j];
    }
    return y;
}

struct LayerNormData {
    std::int64_t rows, cols;
    bool bias, residual;
    Tensor x, w, b, dy, added, y, stat, dx, dw, db;
    Vec dw_before, db_before;

    Vec biases() const { return bias ? b.values() : Vec(static_cast<std::size_t>(cols), 0.0); }
    void forward() {
        table().layernorm(x.src(), w.src(), bias ? b.src() : Src{}, y.dst(), stat.f32(), rows, cols, cols, eps,
                          nullptr);
    }
    void backward() {
        table().layernorm_grad(dy.src(), x.src(), w.src(), stat.f32(), residual ? added.src() : Src{}, dx.dst(),
                               dw.f32(), bias ? db.f32() : nullptr, rows, cols, cols, nullptr);
    }
};

Case layer_norm_case(bool grad, std::int64_t rows, std::int64_t cols, bool bias, bool residual, Type type) {
    Case out;
    out.name = fmt::format("layernorm{} {}x{}{}{} {}", grad ? "_grad" : "", rows, cols, bias ? " bias" : "",
                           residual ? " residual" : "", name_of(type));
    Random random(out.name);
    const std::int64_t n = rows * cols;
    Vec x = random.normal(n);
    for (double& value : x) value += 1.5; // a mean that is not 0
    auto d = std::make_shared<LayerNormData>(LayerNormData{rows,
                                                           cols,
                                                           bias,
                                                           residual,
                                                           Tensor(type, x),
                                                           random.tensor(type, cols),
                                                           random.tensor(type, cols),
                                                           random.tensor(type, n),
                                                           random.tensor(type, n),
                                                           Tensor(type, n),
                                                           Tensor(Type::f32, 2 * rows),
                                                           Tensor(type, n),
                                                           random.tensor(Type::f32, cols),
                                                           random.tensor(Type::f32, cols),
                                                           {},
                                                           {}});
    d->dw_before = d->dw.values(), d->db_before = d->db.values();
    out.tolerance = tolerance(type);
    if (!grad) {
        out.call = [d] { d->forward(); };
        out.error = [d] { return relative_error(d->y, layer_norm(d->x.values(), d->w.values(), d->biases())); };
        return out;
    }
    d->forward();
    out.call = [d] { d->backward(); };
    out.error = [d] {
        const Vec at = d->x.values(), w = d->w.values(), b = d->biases(), dy = d->dy.values();
        Vec dx = gradient([&](const Vec& v) { return layer_norm(v, w, b); }, at, dy);
        if (d->residual) dx = plus(dx, d->added.values());
        const Vec dw = gradient([&](const Vec& v) { return layer_norm(at, v, b); }, w, dy);
        const Vec db = gradient([&](const Vec& v) { return layer_norm(at, w, v); }, b, dy);
        return worst({relative_error(d->dx, dx), relative_error(d->dw, plus(d->dw_before, dw)),
                      relative_error(d->db, d->bias ? plus(d->db_before, db) : d->db_before)});
    };
    return out;
}

struct HeadsData {
    HeadsNormShape s;
    Tensor x, wq, wk, dy, squares, along, y, dx, dwq, dwk;
    Vec dwq_before, dwk_before;

    // The norm where other ranks have the same squares as this one, which are held fixed there.
    Vec forward(const Vec& in, const Vec& q, const Vec& k) const {
        Vec out = in;
        for (std::int64_t r = 0; r < s.tokens; ++r) {
            const auto part = [&](std::int64_t from, std::int64_t cols, std::int64_t all, const Vec& w) {
                double sum = 0.0;
                for (std::int64_t c = 0; c < cols; ++c) {
                    const double value = in[static_cast<std::size_t>(r * s.width + from + c)];
                    sum += value * value;
                }
                const double scale = 1.0 / std::sqrt(sum / static_cast<double>(all) + s.eps);
                for (std::int64_t c = 0; c < cols; ++c)
                    out[static_cast<std::size_t>(r * s.width + from + c)] *= scale * w[static_cast<std::size_t>(c)];
            };
            part(0, s.queries, s.all_queries, q);
            part(s.queries, s.keys, s.all_keys, k);
        }
        return out;
    }
};

Case heads_case(bool grad, HeadsNormShape s, Type type) {
    Case out;
    out.name = fmt::format("heads_norm{} {} tokens {}+{} of {} {}", grad ? "_grad" : "", s.tokens, s.queries, s.keys,
                           s.width, name_of(type));
    Random random(out.name);
    const std::int64_t n = s.tokens * s.width;
    auto d = std::make_shared<HeadsData>(HeadsData{s,
                                                   random.tensor(type, n),
                                                   random.tensor(type, s.queries),
                                                   random.tensor(type, s.keys),
                                                   random.tensor(type, n),
                                                   Tensor(Type::f32, 2 * s.tokens),
                                                   Tensor(Type::f32, 2 * s.tokens),
                                                   Tensor(type, n),
                                                   Tensor(type, n),
                                                   random.tensor(Type::f32, s.queries),
                                                   random.tensor(Type::f32, s.keys),
                                                   {},
                                                   {}});
    d->dwq_before = d->dwq.values(), d->dwk_before = d->dwk.values();
    out.tolerance = tolerance(type);
    const auto forward = [d] {
        table().heads_squares(d->s, d->x.src(), d->squares.f32(), nullptr);
        table().heads_norm(d->s, d->x.src(), d->squares.f32(), d->wq.src(), d->wk.src(), d->y.dst(), nullptr);
    };
    if (!grad) {
        out.call = forward;
        out.error = [d] { return relative_error(d->y, d->forward(d->x.values(), d->wq.values(), d->wk.values())); };
        return out;
    }
    forward();
    out.call = [d] {
        table().heads_along(d->s, d->dy.src(), d->x.src(), d->wq.src(), d->wk.src(), d->along.f32(), nullptr);
        table().heads_norm_grad(d->s, d->dy.src(), d->x.src(), d->squares.f32(), d->along.f32(), d->wq.src(),
                                d->wk.src(), d->dx.dst(), d->dwq.f32(), d->dwk.f32(), nullptr);
    };
    out.error = [d] {
        const Vec x = d->x.values(), q = d->wq.values(), k = d->wk.values(), dy = d->dy.values();
        const Vec dx = gradient([&](const Vec& at) { return d->forward(at, q, k); }, x, dy);
        const Vec dq = gradient([&](const Vec& at) { return d->forward(x, at, k); }, q, dy);
        const Vec dk = gradient([&](const Vec& at) { return d->forward(x, q, at); }, k, dy);
        return worst({relative_error(d->dx, dx), relative_error(d->dwq, plus(d->dwq_before, dq)),
                      relative_error(d->dwk, plus(d->dwk_before, dk))});
    };
    return out;
}

struct ValueNormData {
    ValueNormShape s;
    Tensor x, dy, y, dx;
    Vec forward(const Vec& in) const {
        Vec out;
        const auto at = [&](std::int64_t t, std::int64_t c) {
            return in[static_cast<std::size_t>(t * s.x_width() + c)];
        };
        for (std::int64_t t = 0; t < s.tokens; ++t) {
            for (std::int64_t c = 0; c < s.front; ++c) out.push_back(at(t, c));
            for (std::int64_t h = 0; h < s.heads; ++h) {
                double squares = 0.0;
                const std::int64_t first = s.source() + h * s.dim;
                for (std::int64_t c = 0; c < s.dim; ++c) squares += at(t, first + c) * at(t, first + c);
                const double rstd = 1.0 / std::sqrt(squares / s.dim + s.eps);
                for (std::int64_t c = 0; c < s.dim; ++c) out.push_back(at(t, first + c) * rstd);
            }
        }
        return out;
    }
};

Case value_norm_case(bool grad, const ValueNormShape& s, Type type) {
    Case out;
    out.name = fmt::format("value_norm{} {} tokens {}+{}x{}{} {}", grad ? "_grad" : "", s.tokens, s.front, s.heads,
                           s.dim, s.from_keys ? " of keys" : "", name_of(type));
    Random random(out.name);
    auto d = std::make_shared<ValueNormData>(
        ValueNormData{s, random.tensor(type, s.tokens * s.x_width()), random.tensor(type, s.tokens * s.width()),
                      Tensor(type, s.tokens * s.width()), Tensor(type, s.tokens * s.x_width())});
    out.tolerance = tolerance(type);
    out.bytes =
        static_cast<double>(s.tokens * (s.x_width() * (grad ? 2 : 1) + s.width())) * static_cast<double>(size_of(type));
    out.flops = 4.0 * static_cast<double>(s.tokens * s.values());
    if (!grad) {
        out.call = [d] { table().value_norm(d->s, d->x.src(), d->y.dst(), nullptr); };
        out.error = [d] { return relative_error(d->y, d->forward(d->x.values())); };
        return out;
    }
    out.call = [d] { table().value_norm_grad(d->s, d->dy.src(), d->x.src(), d->dx.dst(), nullptr); };
    out.error = [d] {
        return relative_error(d->dx,
                              gradient([&](const Vec& at) { return d->forward(at); }, d->x.values(), d->dy.values()));
    };
    return out;
}

} // namespace

TEST_CASE("value_norm: values of their own and keys that serve as such") {
    for (const Type type : {Type::f32, Type::bf16})
        for (const bool grad : {false, true}) {
            check(value_norm_case(grad, {4, 12, 2, 6, eps, false}, type));
            check(value_norm_case(grad, {3, 40, 2, 12, eps, true}, type));
            check(value_norm_case(grad, {2, 96, 9, 5, eps, true}, type));
        }
}

TEST_CASE("layernorm: with and without bias and residual, any width") {
    for (const Type type : {Type::f32, Type::bf16})
        for (const bool grad : {false, true})
            for (const bool bias : {false, true})
                for (const std::int64_t cols : {3, 64, 513})
                    check(layer_norm_case(grad, 5, cols, bias, bias && cols > 3, type));
}

TEST_CASE("heads_norm: queries and keys apart, values untouched, heads of other ranks counted") {
    for (const Type type : {Type::f32, Type::bf16})
        for (const bool grad : {false, true}) {
            check(heads_case(grad, {4, 12, 6, 24, 12, 6, eps}, type));
            check(heads_case(grad, {3, 32, 16, 64, 64, 32, eps}, type));
            check(heads_case(grad, {2, 300, 7, 320, 300, 7, eps}, type));
        }
}

TEST_CASE("scale and clip: any length, in place, and the gradient inside the bounds alone") {
    for (const Type type : {Type::f32, Type::bf16})
        for (const std::int64_t n : {1, 7, 64, 5000}) {
            Random random(fmt::format("clip {} {}", n, name_of(type)));
            Tensor x = random.tensor(type, n), y(type, n), dx(type, n);
            const Tensor dy = random.tensor(type, n);
            Vec scaled = x.values(), cut = scaled, back = dy.values();
            for (std::size_t i = 0; i < cut.size(); ++i) {
                if (std::abs(cut[i]) > 0.5) back[i] = 0.0;
                cut[i] = std::clamp(cut[i], -0.5, 0.5);
                scaled[i] *= 1.75;
            }
            Vec soft = x.values(), soft_back = dy.values();
            for (std::size_t i = 0; i < soft.size(); ++i) {
                const double t = std::tanh(soft[i] / 0.7);
                soft[i] = 0.7 * t;
                soft_back[i] *= 1.0 - t * t;
            }
            table().clip(x.src(), 0.7, true, y.dst(), n, nullptr);
            CHECK(relative_error(y, soft) <= tolerance(type));
            table().clip_grad(dy.src(), x.src(), 0.7, true, dx.dst(), n, nullptr);
            CHECK(relative_error(dx, soft_back) <= tolerance(type));
            table().clip(x.src(), 0.5, false, y.dst(), n, nullptr);
            CHECK(relative_error(y, cut) == 0.0);
            table().clip_grad(dy.src(), x.src(), 0.5, false, dx.dst(), n, nullptr);
            CHECK(relative_error(dx, back) == 0.0);
            const Tensor w(type, Vec{-0.5});
            table().scale(x.src(), w.src(), 3.5, y.dst(), n, nullptr);
            for (double& value : scaled) value = -value;
            CHECK(relative_error(y, scaled) <= tolerance(type));
            for (double& value : scaled) value = -value;
            table().scale(x.src(), {}, 1.75, x.dst(), n, nullptr);
            CHECK(relative_error(x, scaled) <= tolerance(type));
        }
}

} // namespace moe::test
