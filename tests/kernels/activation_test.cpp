// Activations and the sigmoid gate against their definitions in double; gradients against central differences.
#include "tests/kernels/case.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace moe::test {
namespace {

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

double curve_of(Curve curve, double x) {
    switch (curve) {
    case Curve::silu:
        return x * sigmoid(x);
    case Curve::gelu:
        return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Curve::quick_gelu:
        return x * sigmoid(1.702 * x);
    case Curve::relu2:
        return x > 0.0 ? x * x : 0.0;
    case Curve::gelu_tanh:
        return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
    }
    return 0.0;
}
const char* name_of(Curve curve) {
    const char* names[] = {"silu", "gelu", "quick_gelu", "relu2", "gelu_tanh"};
    return names[static_cast<int>(curve)];
}

struct ActivationData {
    ActivationShape s;
    bool with_probs, with_counts;
    Index counts;
    std::int64_t rows;
    Tensor x, probs, dy, y, dx, dprobs;

    std::int64_t width() const { return s.gated ? 2 * s.ffn : s.ffn; }
    Vec forward(const Vec& in, const Vec& p) const {
        Vec out;
        for (std::int64_t r = 0; r < rows; ++r) {
            for (std::int64_t j = 0; j < s.ffn; ++j) {
                double up = s.gated ? in[static_cast<std::size_t>(r * width() + s.ffn + j)] : 1.0;
                double gate = in[static_cast<std::size_t>(r * width() + j)];
                if (s.limit > 0.0 && !s.limit_behind) gate = std::min(gate, s.limit);
                if (s.limit > 0.0) up = std::clamp(up, -s.limit, s.limit) + (s.limit_behind ? 0.0 : 1.0);
                const double prob = with_probs ? p[static_cast<std::size_t>(r)] : 1.0;
                double curve = curve_of(s.curve, gate);
                if (s.limit > 0.0 && s.limit_behind) curve = std::min(curve, s.limit);
                out.push_back(curve * up * prob);
            }
        }
        return out;
    }
};

Case activation_case(bool grad, ActivationShape s, bool probs, const Index& counts, Type type) {
    Case out;
    s.groups = static_cast<int>(counts.size());
    out.name =
        fmt::format("activation{} {}{}{} rows {} ffn {}{} counts {} {}", grad ? "_grad" : "", name_of(s.curve),
                    s.gated ? " gated" : "", s.limit > 0.0 ? s.limit_behind ? " clamped behind" : " clamped" : "",
                    s.rows, s.ffn, probs ? " probs" : "", fmt::join(counts, ","), test::name_of(type));
    Random random(out.name);
    std::int64_t rows = counts.empty() ? s.rows : 0;
    for (const int c : counts) rows += c;
    const std::int64_t width = s.gated ? 2 * s.ffn : s.ffn;
    auto d = std::make_shared<ActivationData>(ActivationData{s, probs, !counts.empty(), counts, rows,
                                                             Tensor(type, s.rows * width), Tensor(Type::f32, s.rows),
                                                             Tensor(type, s.rows * s.ffn), Tensor(type, s.rows * s.ffn),
                                                             Tensor(type, s.rows * width), Tensor(Type::f32, s.rows)});
    const Vec x = random.normal(rows * width, 2.0), p = random.normal(rows), dy = random.normal(rows * s.ffn);
    for (std::size_t i = 0; i < x.size(); ++i) d->x.set(static_cast<std::int64_t>(i), x[i]);
    for (std::size_t i = 0; i < p.size(); ++i) d->probs.set(static_cast<std::int64_t>(i), p[i]);
    for (std::size_t i = 0; i < dy.size(); ++i) d->dy.set(static_cast<std::int64_t>(i), dy[i]);
    out.tolerance = tolerance(type);
    out.flops = (grad ? 12.0 : 6.0) * static_cast<double>(rows * s.ffn);
    out.bytes =
        static_cast<double>(rows * (width + s.ffn) + (grad ? rows * width : 0)) * static_cast<double>(size_of(type));
    if (!grad) {
        out.call = [d] {
            table().activation(d->s, d->x.src(), d->with_probs ? d->probs.f32() : nullptr,
                               d->with_counts ? d->counts.data() : nullptr, d->y.dst(), {}, nullptr);
        };
        out.error = [d] {
            const std::int64_t n = d->rows * d->s.ffn;
            return worst({relative_error(d->y.values(0, n), d->forward(d->x.values(), d->probs.values())),
                          demand(d->y.untouched(n, d->y.size() - n))});
        };
        return out;
    }
    out.call = [d] {
        table().activation_grad(d->s, d->dy.src(), d->x.src(), d->with_probs ? d->probs.f32() : nullptr,
                                d->with_counts ? d->counts.data() : nullptr, d->dx.dst(),
                                d->with_probs ? d->dprobs.f32() : nullptr, {}, {}, nullptr);
    };
    out.error = [d] {
        const std::int64_t n = d->rows * d->width();
        const Vec x_at = d->x.values(0, n), p_at = d->probs.values(0, d->rows),
                  dy_at = d->dy.values(0, d->rows * d->s.ffn);
        const Vec dx = gradient([&](const Vec& at) { return d->forward(at, p_at); }, x_at, dy_at);
        const double error =
            worst({relative_error(d->dx.values(0, n), dx), demand(d->dx.untouched(n, d->dx.size() - n))});
        if (!d->with_probs) return error;
        const Vec dp = gradient([&](const Vec& at) { return d->forward(x_at, at); }, p_at, dy_at);
        return worst({error, relative_error(d->dprobs.values(0, d->rows), dp),
                      demand(d->dprobs.untouched(d->rows, d->s.rows - d->rows))});
    };
    return out;
}

ActivationShape shape(std::int64_t rows, std::int64_t ffn, Curve curve, bool gated) {
    ActivationShape s;
    s.rows = rows, s.ffn = ffn, s.curve = curve, s.gated = gated;
    return s;
}

Case sigmoid_scale_case(bool grad, std::int64_t rows, std::int64_t cols, Type type, bool softplus = false) {
    struct Data {
        std::int64_t rows, cols;
        bool softplus;
        Tensor y, g, dout, out, dy, dg;
        Vec forward(const Vec& y_at, const Vec& g_at) const {
            Vec o = y_at;
            for (std::size_t i = 0; i < o.size(); ++i) {
                const double gate = g_at[i / static_cast<std::size_t>(cols)];
                o[i] *= softplus ? std::log1p(std::exp(gate)) : sigmoid(gate);
            }
            return o;
        }
    };
    Case out;
    out.name = fmt::format("sigmoid_scale{} {}x{}{} {}", grad ? "_grad" : "", rows, cols, softplus ? " softplus" : "",
                           test::name_of(type));
    Random random(out.name);
    const std::int64_t n = rows * cols;
    auto d = std::make_shared<Data>(Data{rows, cols, softplus, random.tensor(type, n), random.tensor(type, rows),
                                         random.tensor(type, n), Tensor(type, n), Tensor(type, n), Tensor(type, rows)});
    out.tolerance = tolerance(type);
    out.flops = (grad ? 3.0 : 1.0) * static_cast<double>(n);
    out.bytes = (grad ? 3.0 : 2.0) * static_cast<double>(n) * static_cast<double>(size_of(type));
    out.call = [d, grad] {
        if (grad) {
            table().sigmoid_scale_grad(d->dout.src(), d->y.src(), d->g.src(), d->dy.dst(), d->dg.dst(), d->rows,
                                       d->cols, d->softplus, nullptr);
        } else {
            table().sigmoid_scale(d->y.src(), d->g.src(), d->out.dst(), d->rows, d->cols, d->softplus, nullptr);
        }
    };
    out.error = [d, grad] {
        const Vec y = d->y.values(), g = d->g.values(), dout = d->dout.values();
        if (!grad) return relative_error(d->out, d->forward(y, g));
        return worst({relative_error(d->dy, gradient([&](const Vec& at) { return d->forward(at, g); }, y, dout)),
                      relative_error(d->dg, gradient([&](const Vec& at) { return d->forward(y, at); }, g, dout))});
    };
    return out;
}

Case scale_rows_case(bool grad, const Index& counts, std::int64_t rows, std::int64_t cols, Type type) {
    struct Data {
        Index counts;
        std::int64_t rows, held, cols;
        Tensor y, dout, p, out, dy, dp;
        Vec forward(const Vec& y_at, const Vec& p_at) const {
            Vec o = y_at;
            for (std::size_t i = 0; i < o.size(); ++i) o[i] *= p_at[i / static_cast<std::size_t>(cols)];
            return o;
        }
    };
    Case out;
    out.name = fmt::format("scale_rows{} {}x{} counts {} {}", grad ? "_grad" : "", rows, cols, fmt::join(counts, ","),
                           test::name_of(type));
    Random random(out.name);
    std::int64_t held = counts.empty() ? rows : 0;
    for (const int c : counts) held += c;
    const std::int64_t n = rows * cols;
    auto d = std::make_shared<Data>(Data{counts, rows, held, cols, random.tensor(type, n), random.tensor(type, n),
                                         random.tensor(Type::f32, rows), Tensor(type, n), Tensor(type, n),
                                         Tensor(Type::f32, rows)});
    out.tolerance = tolerance(type);
    out.flops = (grad ? 3.0 : 1.0) * static_cast<double>(held * cols);
    out.bytes = (grad ? 3.0 : 2.0) * static_cast<double>(held * cols) * static_cast<double>(size_of(type));
    out.call = [d, grad] {
        const std::int32_t* limits = d->counts.empty() ? nullptr : d->counts.data();
        const auto groups = static_cast<int>(d->counts.size());
        if (grad) {
            table().scale_rows_grad(d->dout.src(), d->y.src(), d->p.f32(), limits, d->dy.dst(), d->dp.f32(), groups,
                                    d->rows, d->cols, nullptr);
        } else {
            table().scale_rows(d->y.src(), d->p.f32(), limits, d->out.dst(), groups, d->rows, d->cols, nullptr);
        }
    };
    out.error = [d, grad] {
        const std::int64_t n = d->held * d->cols, rest = d->rows * d->cols - n;
        const Vec y = d->y.values(0, n), p = d->p.values(0, d->held), dout = d->dout.values(0, n);
        if (!grad)
            return worst({relative_error(d->out.values(0, n), d->forward(y, p)), demand(d->out.untouched(n, rest))});
        const Vec dy = gradient([&](const Vec&at) { return d->forward(at, p); }, y, dout),
                  dp = gradient([&](const Vec&at) { return d->forward(y, at); }, p, dout);
        return worst({relative_error(d->dy.values(0, n), dy), relative_error(d->dp.values(0, d->held), dp),
                      demand(d->dy.untouched(n, rest)), demand(d->dp.untouched(d->held, d->rows - d->held))});
    };
    return out;
}

} // namespace

TEST_CASE("activation and its gradient: clamped gate and up, before and behind the curve") {
    for (const bool grad : {false, true})
        for (const Type type : {Type::f32, Type::bf16}) {
            ActivationShape s = shape(7, 33, Curve::quick_gelu, true);
            s.limit = 1.5; // of inputs of spread 2: many lie beyond
            check(activation_case(grad, s, false, {}, type));
            check(activation_case(grad, s, true, {2, 0, 3}, type));
            s.curve = Curve::silu, s.limit_behind = true, s.limit = 1.1;
            check(activation_case(grad, s, true, {2, 0, 3}, type));
            check(activation_case(grad, s, false, {}, type));
        }
}

TEST_CASE("activation and its gradient: every curve, gated and plain, with probabilities and counts") {
    for (const Type type : {Type::f32, Type::bf16}) {
        for (const bool grad : {false, true}) {
            for (const Curve curve : {Curve::silu, Curve::gelu, Curve::quick_gelu, Curve::relu2, Curve::gelu_tanh}) {
                for (const bool gated : {false, true}) {
                    check(activation_case(grad, shape(5, 11, curve, gated), false, {}, type));
                    check(activation_case(grad, shape(7, 3, curve, gated), true, {2, 0, 3}, type));
                }
            }
            check(activation_case(grad, shape(3, 5, Curve::silu, true), true, {0, 0}, type));
            check(activation_case(grad, shape(1, 1, Curve::silu, true), true, {1}, type));
        }
        check(activation_case(false, shape(2, 4099, Curve::silu, true), true, {}, type));
    }
}

TEST_CASE("activation: far from zero nothing overflows") {
    Tensor x(Type::f32, Vec{-200.0, 200.0, -90.0, 90.0, 1.0, 1.0, 1.0, 1.0}), y(Type::f32, 4);
    for (const Curve curve : {Curve::silu, Curve::gelu, Curve::quick_gelu}) {
        table().activation(shape(1, 4, curve, true), x.src(), nullptr, nullptr, y.dst(), {}, nullptr);
        CHECK(relative_error(y, {0.0, 200.0, 0.0, 90.0}) <= f32_tolerance);
        CHECK(std::abs(y.at(0)) < 1e-30);
    }
}

TEST_CASE("activation_grad: in place over x") {
    for (const Type type : {Type::f32, Type::bf16}) {
        Random random("activation in place");
        const ActivationShape s = shape(3, 2500, Curve::silu, true);
        Tensor x = random.tensor(type, 3 * 5000), dx(type, 3 * 5000);
        const Tensor dy = random.tensor(type, 3 * 2500), probs = random.tensor(Type::f32, 3);
        Tensor dp(Type::f32, 3), dp2 = dp;
        table().activation_grad(s, dy.src(), x.src(), probs.f32(), nullptr, dx.dst(), dp.f32(), {}, {}, nullptr);
        table().activation_grad(s, dy.src(), x.src(), probs.f32(), nullptr, x.dst(), dp2.f32(), {}, {}, nullptr);
        CHECK(x.values() == dx.values());
        CHECK(dp.values() == dp2.values());
    }
}

TEST_CASE("sigmoid_scale and its gradient") {
    for (const Type type : {Type::f32, Type::bf16}) {
        for (const bool grad : {false, true}) {
            check(sigmoid_scale_case(grad, 1, 1, type));
            check(sigmoid_scale_case(grad, 5, 13, type));
            for (const bool softplus : {false, true}) {
                check(sigmoid_scale_case(grad, 1000, 1, type, softplus)); // a gate for every value
                check(sigmoid_scale_case(grad, 12, 16, type, softplus));
            }
        }
    }
}

TEST_CASE("scale_rows and its gradient") {
    for (const Type type : {Type::f32, Type::bf16})
        for (const bool grad : {false, true}) {
            check(scale_rows_case(grad, {}, 5, 13, type));
            check(scale_rows_case(grad, {2, 0, 3}, 7, 3, type));
            check(scale_rows_case(grad, {0, 0}, 3, 5, type));
        }
}

std::vector<Case> activation_benchmarks() {
    std::vector<Case> out;
    for (const Type type : {Type::f32, Type::bf16}) {
        for (const bool grad : {false, true}) {
            out.push_back(activation_case(grad, shape(2048, 1024, Curve::silu, true), true, {}, type));
            out.push_back(activation_case(grad, shape(2048, 1024, Curve::gelu, false), false, {}, type));
            out.push_back(sigmoid_scale_case(grad, 2048, 1024, type));
            out.push_back(scale_rows_case(grad, {}, 2048, 1024, type));
        }
    }
    return out;
}

} // namespace moe::test
