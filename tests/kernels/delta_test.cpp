// Gated delta nets against the recurrence itself in double, position by position; gradients against central
// differences.
#include "tests/kernels/case.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <cmath>

namespace moe::test {
namespace {

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
double softplus(double x) { return std::log1p(std::exp(x)); }

// All operands of all three ops of a net.
struct Net {
    DeltaShape s;
    Index starts; // of documents, empty: none
    Tensor p, w, c, a_log, dt_bias, o, y, norm, dy, dp, dc, dout, dw, da_log, ddt_bias, dnorm, work;
    Vec dw_before, da_before, ddt_before, dnorm_before;

    std::size_t row(std::int64_t at, std::int64_t b) const { return static_cast<std::size_t>(at * s.batch + b); }
    std::int64_t start(std::int64_t at, std::int64_t b) const { return starts.empty() ? 0 : starts[row(at, b)]; }
    std::int64_t weight_row(std::int64_t channel) const {
        const std::int64_t k = s.keys();
        if (channel < 2 * k) return (channel / k * s.parts + s.part) * k + channel % k;
        return 2 * k * s.parts + s.part * s.values() + channel - 2 * k;
    }

    Vec convolve(const Vec& of_p, const Vec& of_w) const {
        Vec out(static_cast<std::size_t>(s.rows * s.convolved()));
        for (std::int64_t at = 0; at < s.seq(); ++at)
            for (std::int64_t b = 0; b < s.batch; ++b)
                for (std::int64_t i = 0; i < s.convolved(); ++i) {
                    double sum = 0.0;
                    for (std::int64_t j = 0; j < s.kernel && at - j >= start(at, b); ++j)
                        sum += of_w[static_cast<std::size_t>(weight_row(i) * s.kernel + s.kernel - 1 - j)] *
                               of_p[row(at - j, b) * static_cast<std::size_t>(s.projected()) +
                                    static_cast<std::size_t>(i)];
                    out[row(at, b) * static_cast<std::size_t>(s.convolved()) + static_cast<std::size_t>(i)] =
                        sum * sigmoid(sum);
                }
        return out;
    }

    Vec unit(const Vec& of, std::size_t from, std::size_t n) const {
        Vec x(of.begin() + static_cast<std::ptrdiff_t>(from), of.begin() + static_cast<std::ptrdiff_t>(from + n));
        double squares = 1e-6;
        for (const double value : x) squares += value * value;
        for (double& value : x) value /= std::sqrt(squares);
        return x;
    }

    Vec rule(const Vec& of_c, const Vec& of_p, const Vec& of_a, const Vec& of_dt) const {
        Vec out(static_cast<std::size_t>(s.rows * s.values()));
        const auto dk = static_cast<std::size_t>(s.key_dim), dv = static_cast<std::size_t>(s.value_dim);
        for (std::int64_t b = 0; b < s.batch; ++b)
            for (std::int64_t h = 0; h < s.value_heads; ++h) {
                const auto key_head = static_cast<std::size_t>(h / (s.value_heads / s.key_heads));
                const auto weight = static_cast<std::size_t>(s.part * s.value_heads + h);
                Vec state(dk * dv, 0.0);
                for (std::int64_t at = 0; at < s.seq(); ++at) {
                    if (start(at, b) == at) std::fill(state.begin(), state.end(), 0.0);
                    const std::size_t c_row = row(at, b) * static_cast<std::size_t>(s.convolved()),
                                      gate = row(at, b) * static_cast<std::size_t>(s.projected()) +
                                             static_cast<std::size_t>(s.gates() + h);
                    const Vec q = unit(of_c, c_row + key_head * dk, dk),
                              k = unit(of_c, c_row + static_cast<std::size_t>(s.keys()) + key_head * dk, dk);
                    const double beta = sigmoid(of_p[gate]);
                    const double step = of_p[gate + static_cast<std::size_t>(s.value_heads)] + of_dt[weight];
                    const double decay = std::exp(-std::exp(of_a[weight]) * softplus(step));
                    for (std::size_t j = 0; j < dv; ++j) {
                        double seen = 0.0, result = 0.0;
                        for (std::size_t i = 0; i < dk; ++i) seen += (state[i * dv + j] *= decay) * k[i];
                        const std::size_t v = c_row + static_cast<std::size_t>(2 * s.keys() + h * s.value_dim) + j;
                        for (std::size_t i = 0; i < dk; ++i) {
                            state[i * dv + j] += k[i] * beta * (of_c[v] - seen);
                            result += state[i * dv + j] * q[i];
                        }
                        out[row(at, b) * static_cast<std::size_t>(s.values()) + static_cast<std::size_t>(h) * dv + j] =
                            result / std::sqrt(static_cast<double>(dk));
                    }
                }
            }
        return out;
    }

    Vec gated(const Vec& of_o, const Vec& of_p, const Vec& of_w) const {
        Vec out(of_o.size());
        const auto d = static_cast<std::size_t>(s.value_dim);
        for (std::size_t from = 0; from < of_o.size(); from += d) {
            double squares = 0.0;
            for (std::size_t i = 0; i < d; ++i) squares += of_o[from + i] * of_o[from + i] / static_cast<double>(d);
            const std::size_t token = from / static_cast<std::size_t>(s.values()),
                              head = from % static_cast<std::size_t>(s.values());
            for (std::size_t i = 0; i < d; ++i) {
                const double z = of_p[token * static_cast<std::size_t>(s.projected()) +
                                      static_cast<std::size_t>(s.convolved()) + head + i];
                out[from + i] = of_o[from + i] / std::sqrt(squares + s.eps) * of_w[i] * z * sigmoid(z);
            }
        }
        return out;
    }

    // Columns [from, from + count) of each row of dp, and of a vector that lies as p does.
    Vec columns(const Vec& of, std::int64_t from, std::int64_t count) const {
        Vec out;
        for (std::int64_t r = 0; r < s.rows; ++r)
            for (std::int64_t i = 0; i < count; ++i)
                out.push_back(of[static_cast<std::size_t>(r * s.projected() + from + i)]);
        return out;
    }
};

struct Options {
    int documents = 0; // borders of each sequence
    Type type = Type::f32;
};

std::shared_ptr<Net> net_of(DeltaShape s, const std::string& name, Options o, std::int64_t work = 0) {
    Random random(name);
    const std::int64_t heads = std::int64_t{s.parts} * s.value_heads;
    auto d = std::make_shared<Net>(Net{s,
                                       {},
                                       random.tensor(o.type, s.rows * s.projected()),
                                       random.tensor(o.type, s.parts * s.convolved() * s.kernel, 0.5),
                                       random.tensor(o.type, s.rows * s.convolved()),
                                       random.tensor(o.type, heads, 0.5),
                                       random.tensor(o.type, heads, 0.5),
                                       random.tensor(o.type, s.rows * s.values()),
                                       Tensor(o.type, s.rows * s.values()),
                                       random.tensor(o.type, s.value_dim),
                                       random.tensor(o.type, s.rows * s.values()),
                                       Tensor(o.type, s.rows * s.projected()),
                                       Tensor(o.type, s.rows * s.convolved()),
                                       Tensor(o.type, s.rows * s.values()),
                                       random.tensor(Type::f32, s.parts * s.convolved() * s.kernel),
                                       random.tensor(Type::f32, heads),
                                       random.tensor(Type::f32, heads),
                                       random.tensor(Type::f32, s.value_dim),
                                       Tensor(Type::f32, work),
                                       {},
                                       {},
                                       {},
                                       {}});
    d->dw_before = d->dw.values(), d->da_before = d->da_log.values();
    d->ddt_before = d->ddt_bias.values(), d->dnorm_before = d->dnorm.values();
    if (o.documents > 0) {
        d->starts.resize(static_cast<std::size_t>(s.rows));
        for (std::int64_t b = 0; b < s.batch; ++b) {
            std::vector<bool> begins(static_cast<std::size_t>(s.seq()));
            for (int i = 0; i < o.documents; ++i)
                begins[static_cast<std::size_t>(random.below(static_cast<std::int32_t>(s.seq())))] = true;
            std::int32_t start = 0;
            for (std::int64_t at = 0; at < s.seq(); ++at) {
                if (begins[static_cast<std::size_t>(at)]) start = static_cast<std::int32_t>(at);
                d->starts[d->row(at, b)] = start;
            }
        }
        d->s.document_start = d->starts.data();
    }
    return d;
}

std::string describe(const char* op, const DeltaShape& s, Options o) {
    return fmt::format("{} {} rows of {}, heads {}/{} of {}/{}, {} taps, part {} of {}, documents {} {}", op, s.rows,
                       s.batch, s.key_heads, s.value_heads, s.key_dim, s.value_dim, s.kernel, s.part, s.parts,
                       o.documents, name_of(o.type));
}

Case conv_case(bool grad, const DeltaShape& s, Options o) {
    Case out;
    out.name = describe(grad ? "short_conv_grad" : "short_conv", s, o);
    auto d = net_of(s, out.name, o);
    out.tolerance = tolerance(o.type);
    out.bytes = static_cast<double>(s.rows * s.convolved() * (grad ? 3 : 2)) * static_cast<double>(size_of(o.type));
    if (!grad) {
        out.call = [d] { table().short_conv(d->s, d->p.src(), d->w.src(), d->c.dst(), nullptr); };
        out.error = [d] { return relative_error(d->c, d->convolve(d->p.values(), d->w.values())); };
        return out;
    }
    const Vec dc = d->c.values(); // the gradient's operand
    out.call = [d] {
        table().short_conv_grad(d->s, d->c.src(), d->p.src(), d->w.src(), d->dp.dst(), d->dw.f32(), nullptr);
    };
    out.error = [d, dc] {
        const Vec p = d->p.values(), w = d->w.values(), dp = d->dp.values();
        const std::int64_t n = d->s.convolved();
        const Vec want = gradient([&](const Vec& at) { return d->convolve(at, w); }, p, dc);
        bool rest = true;
        for (std::int64_t r = 0; r < d->s.rows; ++r)
            rest = rest && d->dp.untouched(r * d->s.projected() + n, d->s.projected() - n);
        return worst({relative_error(d->columns(dp, 0, n), d->columns(want, 0, n)), demand(rest),
                      relative_error(d->dw, plus(d->dw_before,
                                                 gradient([&](const Vec& at) { return d->convolve(p, at); }, w, dc)))});
    };
    return out;
}

Case norm_case(bool grad, const DeltaShape& s, Options o) {
    Case out;
    out.name = describe(grad ? "gated_norm_grad" : "gated_norm", s, o);
    auto d = net_of(s, out.name, o);
    out.tolerance = tolerance(o.type);
    out.bytes = static_cast<double>(s.rows * s.values() * (grad ? 5 : 3)) * static_cast<double>(size_of(o.type));
    if (!grad) {
        out.call = [d] { table().gated_norm(d->s, d->o.src(), d->p.src(), d->norm.src(), d->y.dst(), nullptr); };
        out.error = [d] { return relative_error(d->y, d->gated(d->o.values(), d->p.values(), d->norm.values())); };
        return out;
    }
    out.call = [d] {
        table().gated_norm_grad(d->s, d->dy.src(), d->o.src(), d->p.src(), d->norm.src(), d->dout.dst(), d->dp.dst(),
                                d->dnorm.f32(), nullptr);
    };
    out.error = [d] {
        const Vec x = d->o.values(), p = d->p.values(), w = d->norm.values(), dy = d->dy.values();
        const std::int64_t z = d->s.convolved(), n = d->s.values();
        const Vec dp = gradient([&](const Vec& at) { return d->gated(x, at, w); }, p, dy);
        return worst(
            {relative_error(d->dout, gradient([&](const Vec& at) { return d->gated(at, p, w); }, x, dy)),
             relative_error(d->columns(d->dp.values(), z, n), d->columns(dp, z, n)),
             relative_error(
                 d->dnorm, plus(d->dnorm_before, gradient([&](const Vec& at) { return d->gated(x, p, at); }, w, dy)))});
    };
    return out;
}

double rule_flops(const DeltaShape& s) {
    return 2.0 * static_cast<double>(s.rows) * s.value_heads *
           (3.0 * s.key_dim * s.value_dim + 64.0 * (s.key_dim + s.value_dim));
}

// Triangular systems of up to 64 rows add up what rounding leaves: 3x.
Case rule_case(bool grad, const DeltaShape& s, Options o) {
    Case out;
    out.name = describe(grad ? "delta_rule_grad" : "delta_rule", s, o);
    auto d = net_of(s, out.name, o, s.work(grad));
    out.tolerance = (grad && o.type == Type::f32 ? 6.0 : 3.0) * tolerance(o.type); // sums of sums of a chunk's rows
    out.flops = rule_flops(s) * (grad ? 2.5 : 1.0);
    out.bytes = static_cast<double>(s.rows * (s.convolved() + s.values()) * (grad ? 2 : 1)) *
                static_cast<double>(size_of(o.type));
    if (!grad) {
        out.call = [d] {
            table().delta_rule(d->s, d->c.src(), d->p.src(), d->a_log.src(), d->dt_bias.src(), d->y.dst(),
                               d->work.f32(), nullptr);
        };
        out.error = [d] {
            return relative_error(d->y, d->rule(d->c.values(), d->p.values(), d->a_log.values(), d->dt_bias.values()));
        };
        return out;
    }
    out.call = [d] {
        table().delta_rule_grad(d->s, d->dy.src(), d->c.src(), d->p.src(), d->a_log.src(), d->dt_bias.src(),
                                d->dc.dst(), d->dp.dst(), d->da_log.f32(), d->ddt_bias.f32(), d->work.f32(), nullptr);
    };
    out.error = [d] {
        const Vec c = d->c.values(), p = d->p.values(), a = d->a_log.values(), dt = d->dt_bias.values(),
                  dy = d->dy.values();
        const std::int64_t gates = d->s.gates(), n = 2 * d->s.value_heads;
        // Only the gates of p take part: differences of the others would cost all the time.
        const auto of_gates = [&](const Vec& at) {
            Vec all = p;
            for (std::int64_t r = 0; r < d->s.rows; ++r)
                for (std::int64_t i = 0; i < n; ++i)
                    all[static_cast<std::size_t>(r * d->s.projected() + gates + i)] =
                        at[static_cast<std::size_t>(r * n + i)];
            return d->rule(c, all, a, dt);
        };
        const Vec dgates = gradient(of_gates, d->columns(p, gates, n), dy);
        return worst(
            {relative_error(d->dc, gradient([&](const Vec& at) { return d->rule(at, p, a, dt); }, c, dy)),
             relative_error(d->columns(d->dp.values(), gates, n), dgates),
             relative_error(d->da_log,
                            plus(d->da_before, gradient([&](const Vec& at) { return d->rule(c, p, at, dt); }, a, dy))),
             relative_error(d->ddt_bias, plus(d->ddt_before,
                                              gradient([&](const Vec& at) { return d->rule(c, p, a, at); }, dt, dy)))});
    };
    return out;
}

// One row after another, the first of them in a window and a state of NaN.
Case cached_case(const DeltaShape& s, Type type) {
    Case out;
    out.name = describe("delta_cached", s, {0, type});
    auto d = net_of(s, out.name, {0, type});
    out.tolerance = 3.0 * tolerance(type);
    auto window = std::make_shared<Tensor>(type, std::max(1, s.kernel - 1) * s.convolved());
    auto state = std::make_shared<Tensor>(Type::f32, s.values() * s.key_dim);
    auto positions = std::make_shared<Index>();
    for (std::int32_t i = 0; i < s.rows; ++i) positions->push_back(i);
    out.call = [d, window, state, positions] {
        DeltaShape one = d->s;
        one.rows = 1;
        for (std::int64_t r = 0; r < d->s.rows; ++r)
            table().delta_cached(one, d->p.src() + r * one.projected(), d->w.src(), d->a_log.src(), d->dt_bias.src(),
                                 positions->data() + r, d->y.dst() + r * one.values(), window->dst(), state->f32(),
                                 nullptr);
    };
    out.error = [d] {
        const Vec p = d->p.values();
        return relative_error(d->y, d->rule(d->convolve(p, d->w.values()), p, d->a_log.values(), d->dt_bias.values()));
    };
    return out;
}

// Sequences within a chunk, to its end, and beyond; wide and narrow heads, key heads of one or more value heads.
const std::vector<DeltaShape>& shapes() {
    static const std::vector<DeltaShape> all{
        {7, 1, 1, 1, 3, 5, 4}, {64, 1, 1, 2, 6, 4, 4}, {150, 2, 2, 4, 3, 2, 3}, {140, 1, 1, 1, 4, 9, 1, 1e-6, 1, 3}};
    return all;
}

} // namespace

TEST_CASE("short_conv: any taps, documents, channels of a part of the heads") {
    for (const Type type : {Type::f32, Type::bf16})
        for (const bool grad : {false, true})
            for (const DeltaShape& s : {shapes()[0], DeltaShape{40, 2, 2, 4, 3, 2, 3},
                                        DeltaShape{70, 1, 1, 1, 4, 3, 1, 1e-6, 1, 3}, DeltaShape{3, 1, 1, 1, 2, 2, 8}})
                for (const int documents : {0, 4}) check(conv_case(grad, s, {documents, type}));
}

TEST_CASE("gated_norm: heads of any width") {
    for (const Type type : {Type::f32, Type::bf16})
        for (const bool grad : {false, true})
            for (const DeltaShape& s :
                 {shapes()[0], DeltaShape{6, 1, 1, 3, 2, 40, 2}, DeltaShape{3, 1, 1, 2, 2, 128, 2}})
                check(norm_case(grad, s, {0, type}));
}

TEST_CASE("delta_rule: the chunks' result is the recurrence's, within and across chunks, with documents") {
    for (const Type type : {Type::f32, Type::bf16})
        for (const int documents : {0, 5}) {
            for (const DeltaShape& s : shapes()) check(rule_case(false, s, {documents, type}));
            check(rule_case(false, {130, 1, 1, 2, 128, 128, 4}, {documents, type}));
        }
}

TEST_CASE("delta_rule: gradients of all operands, within and across chunks, with documents") {
    for (const int documents : {0, 5}) {
        for (const DeltaShape& s : shapes()) check(rule_case(true, s, {documents, Type::f32}));
        check(rule_case(true, shapes()[1], {documents, Type::bf16}));
    }
}

// Differences of heads of 128 columns would take minutes: the reference is the CPU's kernel in FP32.
TEST_CASE("delta_rule: gradients of heads of 128 columns are the CPU's in FP32") {
    for (const int documents : {0, 5}) {
        const DeltaShape shape{2 * 130, 2, 1, 2, 128, 128, 4};
        Case c;
        c.name = describe("delta_rule_grad", shape, {documents, Type::bf16});
        c.tolerance = 3.0 * tolerance(Type::bf16);
        auto d = net_of(shape, c.name, {documents, Type::bf16}, shape.work(true));
        c.call = [d] {
            table().delta_rule_grad(d->s, d->dy.src(), d->c.src(), d->p.src(), d->a_log.src(), d->dt_bias.src(),
                                    d->dc.dst(), d->dp.dst(), d->da_log.f32(), d->ddt_bias.f32(), d->work.f32(),
                                    nullptr);
        };
        c.error = [d] {
            const DeltaShape& s = d->s;
            const auto wide = [](const Tensor& x) { return Tensor(Type::f32, x.values()); };
            const Tensor dy = wide(d->dy), in = wide(d->c), p = wide(d->p), a = wide(d->a_log), dt = wide(d->dt_bias);
            Tensor dc(Type::f32, d->dc.size()), dp(Type::f32, d->dp.size()), work(Type::f32, s.work(true));
            Tensor da(Type::f32, d->da_before), ddt(Type::f32, d->ddt_before);
            cpu_kernels().delta_rule_grad(s, dy.src(), in.src(), p.src(), a.src(), dt.src(), dc.dst(), dp.dst(),
                                          da.f32(), ddt.f32(), work.f32(), nullptr);
            const std::int64_t gates = s.gates(), n = 2 * s.value_heads;
            return worst({relative_error(d->dc, dc.values()),
                          relative_error(d->columns(d->dp.values(), gates, n), d->columns(dp.values(), gates, n)),
                          relative_error(d->da_log, da.values()), relative_error(d->ddt_bias, ddt.values())});
        };
        check(c);
    }
}

TEST_CASE("delta_cached: one row after another is the whole sequence") {
    for (const Type type : {Type::f32, Type::bf16}) {
        check(cached_case({9, 1, 1, 2, 6, 4, 4}, type));
        check(cached_case({5, 1, 2, 2, 3, 40, 1}, type));
    }
}

std::vector<Case> delta_benchmarks() {
    const DeltaShape layer{2048, 1, 16, 32, 128, 128, 4}; // of Qwen3-Next
    std::vector<Case> list;
    for (const bool grad : {false, true}) {
        list.push_back(conv_case(grad, layer, {0, Type::bf16}));
        list.push_back(rule_case(grad, layer, {0, Type::bf16}));
        list.push_back(norm_case(grad, layer, {0, Type::bf16}));
    }
    return list;
}

} // namespace moe::test
