// A layer with a state, its operands and its ops in double: the recurrence itself, position by position.
#pragma once

#include "tests/kernels/case.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace moe::test {

inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
inline double softplus(double x) { return std::log1p(std::exp(x)); }

// All operands of the ops of a layer.
struct Net {
    StateShape s;
    Index starts; // of documents, empty: none
    Tensor p, w, bias, c, a_log, dt_bias, skip, o, y, norm, dy, dp, dc, dout, dw, dbias, da_log, ddt_bias, dskip, dnorm,
        work;
    Vec dw_before, dbias_before, da_before, ddt_before, dskip_before, dnorm_before;

    bool ssd() const { return s.rule == StateRule::ssd; }
    Src conv_bias() const { return ssd() ? bias.src() : Src{}; }

    std::size_t row(std::int64_t at, std::int64_t b) const { return static_cast<std::size_t>(at * s.batch + b); }
    std::int64_t start(std::int64_t at, std::int64_t b) const { return starts.empty() ? 0 : starts[row(at, b)]; }
    std::int64_t weight_row(std::int64_t channel) const {
        const std::int64_t k = s.keys();
        if (channel < 2 * k) return (channel / k * s.parts + s.part) * k + channel % k;
        return 2 * k * s.parts + s.part * s.values() + channel - 2 * k;
    }

    Vec convolve(const Vec& of_p, const Vec& of_w, const Vec& of_bias) const {
        Vec out(static_cast<std::size_t>(s.rows * s.convolved()));
        for (std::int64_t at = 0; at < s.seq(); ++at)
            for (std::int64_t b = 0; b < s.batch; ++b)
                for (std::int64_t i = 0; i < s.convolved(); ++i) {
                    double sum = ssd() ? of_bias[static_cast<std::size_t>(weight_row(i))] : 0.0;
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

    Vec rule(const Vec& of_c, const Vec& of_p, const Vec& of_a, const Vec& of_dt, const Vec& of_skip) const {
        return ssd() ? ssd_rule(of_c, of_p, of_a, of_dt, of_skip) : delta_rule(of_c, of_p, of_a, of_dt);
    }

    Vec ssd_rule(const Vec& of_c, const Vec& of_p, const Vec& of_a, const Vec& of_dt, const Vec& of_skip) const {
        Vec out(static_cast<std::size_t>(s.rows * s.values()));
        const auto dk = static_cast<std::size_t>(s.key_dim), dv = static_cast<std::size_t>(s.value_dim);
        for (std::int64_t b = 0; b < s.batch; ++b)
            for (std::int64_t h = 0; h < s.value_heads; ++h) {
                const auto group = static_cast<std::size_t>(h / (s.value_heads / s.key_heads));
                const auto weight = static_cast<std::size_t>(s.part * s.value_heads + h);
                Vec state(dk * dv, 0.0);
                for (std::int64_t at = 0; at < s.seq(); ++at) {
                    if (start(at, b) == at) std::fill(state.begin(), state.end(), 0.0);
                    const std::size_t q = row(at, b) * static_cast<std::size_t>(s.convolved()) + group * dk,
                                      k = q + static_cast<std::size_t>(s.keys()),
                                      v = row(at, b) * static_cast<std::size_t>(s.convolved()) +
                                          static_cast<std::size_t>(2 * s.keys() + h * s.value_dim);
                    const double raw = of_p[row(at, b) * static_cast<std::size_t>(s.projected()) +
                                            static_cast<std::size_t>(s.gates() + h)] +
                                       of_dt[weight];
                    const double step = std::clamp<double>(softplus(raw), s.step_min, s.step_max);
                    const double decay = std::exp(-std::exp(of_a[weight]) * step);
                    for (std::size_t j = 0; j < dv; ++j) {
                        double result = of_skip[weight] * of_c[v + j];
                        for (std::size_t i = 0; i < dk; ++i) {
                            state[i * dv + j] = decay * state[i * dv + j] + of_c[k + i] * step * of_c[v + j];
                            result += state[i * dv + j] * of_c[q + i];
                        }
                        out[row(at, b) * static_cast<std::size_t>(s.values()) + static_cast<std::size_t>(h) * dv + j] =
                            result;
                    }
                }
            }
        return out;
    }

    Vec delta_rule(const Vec& of_c, const Vec& of_p, const Vec& of_a, const Vec& of_dt) const {
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

    // The norm's weight of a column of a token's values.
    std::int64_t norm_weight(std::int64_t column) const {
        return ssd() ? s.part * s.values() + column : column % s.value_dim;
    }

    // delta: a head's norm, then its gate; ssd: the gates, then a group's norm.
    Vec gated(const Vec& of_o, const Vec& of_p, const Vec& of_w) const {
        Vec out(of_o.size());
        const auto d = static_cast<std::size_t>(s.norm_columns());
        for (std::size_t from = 0; from < of_o.size(); from += d) {
            const std::size_t token = from / static_cast<std::size_t>(s.values()),
                              column = from % static_cast<std::size_t>(s.values());
            const auto weight = static_cast<std::size_t>(norm_weight(static_cast<std::int64_t>(column)));
            Vec x(d), gate(d);
            double squares = 0.0;
            for (std::size_t i = 0; i < d; ++i) {
                const double z = of_p[token * static_cast<std::size_t>(s.projected()) +
                                      static_cast<std::size_t>(s.convolved()) + column + i];
                gate[i] = z * sigmoid(z);
                x[i] = of_o[from + i] * (ssd() ? gate[i] : 1.0);
                squares += x[i] * x[i] / static_cast<double>(d);
            }
            for (std::size_t i = 0; i < d; ++i)
                out[from + i] = x[i] / std::sqrt(squares + s.eps) * of_w[weight + i] * (ssd() ? 1.0 : gate[i]);
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

inline std::shared_ptr<Net> net_of(StateShape s, const std::string& name, Options o, std::int64_t work = 0) {
    Random random(name);
    const std::int64_t heads = std::int64_t{s.parts} * s.value_heads;
    const std::int64_t channels = s.parts * s.convolved(), values = s.rows * s.values();
    const std::int64_t norms = s.rule == StateRule::ssd ? s.parts * s.values() : s.value_dim;
    auto d = std::make_shared<Net>(Net{s,
                                       {},
                                       random.tensor(o.type, s.rows * s.projected()),
                                       random.tensor(o.type, channels * s.kernel, 0.5),
                                       random.tensor(o.type, channels),
                                       random.tensor(o.type, s.rows * s.convolved()),
                                       random.tensor(o.type, heads, 0.5),
                                       random.tensor(o.type, heads, 0.5),
                                       random.tensor(o.type, heads),
                                       random.tensor(o.type, values),
                                       Tensor(o.type, values),
                                       random.tensor(o.type, norms),
                                       random.tensor(o.type, values),
                                       Tensor(o.type, s.rows * s.projected()),
                                       Tensor(o.type, s.rows * s.convolved()),
                                       Tensor(o.type, values),
                                       random.tensor(Type::f32, channels * s.kernel),
                                       random.tensor(Type::f32, channels),
                                       random.tensor(Type::f32, heads),
                                       random.tensor(Type::f32, heads),
                                       random.tensor(Type::f32, heads),
                                       random.tensor(Type::f32, norms),
                                       Tensor(Type::f32, work),
                                       {},
                                       {},
                                       {},
                                       {},
                                       {},
                                       {}});
    d->dbias_before = d->dbias.values(), d->dskip_before = d->dskip.values();
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

inline std::string describe(const char* op, const StateShape& s, Options o) {
    return fmt::format("{} {} {} rows of {}, heads {}/{} of {}/{}, {} taps, part {} of {}, documents {} {}", op,
                       s.rule == StateRule::ssd ? "ssd" : "delta", s.rows, s.batch, s.key_heads, s.value_heads,
                       s.key_dim, s.value_dim, s.kernel, s.part, s.parts, o.documents, name_of(o.type));
}

} // namespace moe::test
