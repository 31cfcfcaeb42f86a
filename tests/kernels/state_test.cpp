// Layers with a state, gated delta nets and Mamba-2, against the recurrence itself in double; gradients against central
// differences.
#include "tests/kernels/state_net.hpp"

#include <doctest/doctest.h>

namespace moe::test {
namespace {

Case conv_case(bool grad, const StateShape& s, Options o) {
    Case out;
    out.name = describe(grad ? "short_conv_grad" : "short_conv", s, o);
    auto d = net_of(s, out.name, o);
    out.tolerance = tolerance(o.type);
    out.bytes = static_cast<double>(s.rows * s.convolved() * (grad ? 3 : 2)) * static_cast<double>(size_of(o.type));
    if (!grad) {
        out.call = [d] { table().short_conv(d->s, d->p.src(), d->w.src(), d->conv_bias(), d->c.dst(), nullptr); };
        out.error = [d] { return relative_error(d->c, d->convolve(d->p.values(), d->w.values(), d->bias.values())); };
        return out;
    }
    const Vec dc = d->c.values(); // the gradient's operand
    out.call = [d] {
        table().short_conv_grad(d->s, d->c.src(), d->p.src(), d->w.src(), d->conv_bias(), d->dp.dst(), d->dw.f32(),
                                d->ssd() ? d->dbias.f32() : nullptr, nullptr);
    };
    out.error = [d, dc] {
        const Vec p = d->p.values(), w = d->w.values(), bias = d->bias.values(), dp = d->dp.values();
        const std::int64_t n = d->s.convolved();
        const Vec want = gradient([&](const Vec&at) { return d->convolve(at, w, bias); }, p, dc),
                  dbias = gradient([&](const Vec&at) { return d->convolve(p, w, at); }, bias, dc);
        bool rest = true;
        for (std::int64_t r = 0; r < d->s.rows; ++r)
            rest = rest && d->dp.untouched(r * d->s.projected() + n, d->s.projected() - n);
        return worst(
            {relative_error(d->columns(dp, 0, n), d->columns(want, 0, n)), demand(rest),
             relative_error(d->dbias, plus(d->dbias_before, dbias)),
             relative_error(
                 d->dw, plus(d->dw_before, gradient([&](const Vec& at) { return d->convolve(p, at, bias); }, w, dc)))});
    };
    return out;
}

Vec part(const Vec& x, std::int64_t from, std::int64_t count) {
    return Vec(x.begin() + from, x.begin() + from + count);
}
void append(Vec& x, const Vec& more) { x.insert(x.end(), more.begin(), more.end()); }

Case norm_case(bool grad, const StateShape& s, Options o) {
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
        // Tokens are apart, and only the gates of p take part: differences of all for each number would cost minutes.
        Vec dx, dgates;
        for (std::int64_t r = 0; r < d->s.rows; ++r) {
            const Vec row = part(x, r * n, n), of_p = part(p, r * d->s.projected(), d->s.projected()),
                      of_dy = part(dy, r * n, n);
            const auto of_gates = [&](const Vec& at) {
                Vec all = of_p;
                std::copy(at.begin(), at.end(), all.begin() + z);
                return d->gated(row, all, w);
            };
            append(dx, gradient([&](const Vec& at) { return d->gated(at, of_p, w); }, row, of_dy));
            append(dgates, gradient(of_gates, part(of_p, z, n), of_dy));
        }
        // The result is linear in the weights.
        Vec dw(w.size());
        const Vec without = d->gated(x, p, Vec(w.size(), 1.0));
        for (std::size_t i = 0; i < without.size(); ++i)
            dw[static_cast<std::size_t>(d->norm_weight(static_cast<std::int64_t>(i) % n))] += dy[i] * without[i];
        return worst({relative_error(d->dout, dx), relative_error(d->columns(d->dp.values(), z, n), dgates),
                      relative_error(d->dnorm, plus(d->dnorm_before, dw))});
    };
    return out;
}

double rule_flops(const StateShape& s) {
    const double products = s.rule == StateRule::ssd ? 2.0 : 3.0, inner = s.rule == StateRule::ssd ? 32.0 : 64.0;
    return 2.0 * static_cast<double>(s.rows) * s.value_heads *
           (products * s.key_dim * s.value_dim + inner * (s.key_dim + s.value_dim));
}

void call_rule(Net& d) {
    if (d.ssd())
        return table().ssd(d.s, d.c.src(), d.p.src(), d.a_log.src(), d.dt_bias.src(), d.skip.src(), d.y.dst(),
                           d.work.f32(), nullptr);
    table().delta_rule(d.s, d.c.src(), d.p.src(), d.a_log.src(), d.dt_bias.src(), d.y.dst(), d.work.f32(), nullptr);
}

void call_rule_grad(Net& d) {
    if (d.ssd())
        return table().ssd_grad(d.s, d.dy.src(), d.c.src(), d.p.src(), d.a_log.src(), d.dt_bias.src(), d.skip.src(),
                                d.dc.dst(), d.dp.dst(), d.da_log.f32(), d.ddt_bias.f32(), d.dskip.f32(), d.work.f32(),
                                nullptr);
    table().delta_rule_grad(d.s, d.dy.src(), d.c.src(), d.p.src(), d.a_log.src(), d.dt_bias.src(), d.dc.dst(),
                            d.dp.dst(), d.da_log.f32(), d.ddt_bias.f32(), d.work.f32(), nullptr);
}

// Triangular systems of up to 64 rows, and states along chunks, add up what rounding leaves: 3x.
Case rule_case(bool grad, const StateShape& s, Options o) {
    Case out;
    const bool ssd = s.rule == StateRule::ssd;
    const char* name = ssd ? "ssd" : "delta_rule";
    out.name = describe(grad ? (std::string(name) + "_grad").c_str() : name, s, o);
    auto d = net_of(s, out.name, o, s.work(grad));
    // Gradients: sums of sums of a chunk's rows, and their differences. An H200 was seen 2.0e-5 off, 6.7 tolerances.
    out.tolerance = (grad && o.type == Type::f32 ? 10.0 : 3.0) * tolerance(o.type);
    out.flops = rule_flops(s) * (grad ? 2.5 : 1.0);
    out.bytes = static_cast<double>(s.rows * (s.convolved() + s.values()) * (grad ? 2 : 1)) *
                static_cast<double>(size_of(o.type));
    if (!grad) {
        out.call = [d] { call_rule(*d); };
        out.error = [d] {
            return relative_error(
                d->y, d->rule(d->c.values(), d->p.values(), d->a_log.values(), d->dt_bias.values(), d->skip.values()));
        };
        return out;
    }
    out.call = [d] { call_rule_grad(*d); };
    out.error = [d] {
        const Vec c = d->c.values(), p = d->p.values(), a = d->a_log.values(), dt = d->dt_bias.values(),
                  skip = d->skip.values(), dy = d->dy.values();
        const std::int64_t gates = d->s.gates(), n = d->s.gate_columns();
        // Only the gates of p take part: differences of the others would cost all the time.
        const auto of_gates = [&](const Vec& at) {
            Vec all = p;
            for (std::int64_t r = 0; r < d->s.rows; ++r)
                for (std::int64_t i = 0; i < n; ++i)
                    all[static_cast<std::size_t>(r * d->s.projected() + gates + i)] =
                        at[static_cast<std::size_t>(r * n + i)];
            return d->rule(c, all, a, dt, skip);
        };
        const Vec dgates = gradient(of_gates, d->columns(p, gates, n), dy);
        const Vec dc = gradient([&](const Vec&at) { return d->rule(at, p, a, dt, skip); }, c, dy),
                  da = gradient([&](const Vec&at) { return d->rule(c, p, at, dt, skip); }, a, dy),
                  ddt = gradient([&](const Vec&at) { return d->rule(c, p, a, at, skip); }, dt, dy),
                  dskip = gradient([&](const Vec&at) { return d->rule(c, p, a, dt, at); }, skip, dy);
        return worst({relative_error(d->dc, dc), relative_error(d->columns(d->dp.values(), gates, n), dgates),
                      relative_error(d->da_log, plus(d->da_before, da)),
                      relative_error(d->ddt_bias, plus(d->ddt_before, ddt)),
                      relative_error(d->dskip, plus(d->dskip_before, dskip))});
    };
    return out;
}

// One row after another, the first of them in a window and a state of NaN.
Case cached_case(const StateShape& s, Type type) {
    Case out;
    out.name = describe(s.rule == StateRule::ssd ? "ssd_cached" : "delta_cached", s, {0, type});
    auto d = net_of(s, out.name, {0, type});
    out.tolerance = 3.0 * tolerance(type);
    auto window = std::make_shared<Tensor>(type, std::max(1, s.kernel - 1) * s.convolved());
    auto state = std::make_shared<Tensor>(Type::f32, s.values() * s.key_dim);
    auto positions = std::make_shared<Index>();
    for (std::int32_t i = 0; i < s.rows; ++i) positions->push_back(i);
    out.call = [d, window, state, positions] {
        StateShape one = d->s;
        one.rows = 1;
        for (std::int64_t r = 0; r < d->s.rows; ++r) {
            const Src p = d->p.src() + r * one.projected();
            const Dst y = d->y.dst() + r * one.values();
            if (d->ssd())
                table().ssd_cached(one, p, d->w.src(), d->bias.src(), d->a_log.src(), d->dt_bias.src(), d->skip.src(),
                                   positions->data() + r, y, window->dst(), state->f32(), nullptr);
            else
                table().delta_cached(one, p, d->w.src(), d->a_log.src(), d->dt_bias.src(), positions->data() + r, y,
                                     window->dst(), state->f32(), nullptr);
        }
    };
    out.error = [d] {
        const Vec p = d->p.values();
        return relative_error(d->y, d->rule(d->convolve(p, d->w.values(), d->bias.values()), p, d->a_log.values(),
                                            d->dt_bias.values(), d->skip.values()));
    };
    return out;
}

// Operands in BF16, against the same numbers in FP32 on the CPU.
Case wide_grad_case(const StateShape& shape, int documents) {
    Case c;
    const bool ssd = shape.rule == StateRule::ssd;
    c.name = describe(ssd ? "ssd_grad" : "delta_rule_grad", shape, {documents, Type::bf16});
    c.tolerance = 3.0 * tolerance(Type::bf16);
    auto d = net_of(shape, c.name, {documents, Type::bf16}, shape.work(true));
    c.call = [d] { call_rule_grad(*d); };
    c.error = [d] {
        const StateShape& s = d->s;
        const auto wide = [](const Tensor& x) { return Tensor(Type::f32, x.values()); };
        const Tensor dy = wide(d->dy), in = wide(d->c), p = wide(d->p), a = wide(d->a_log), dt = wide(d->dt_bias),
                     skip = wide(d->skip);
        Tensor dc(Type::f32, d->dc.size()), dp(Type::f32, d->dp.size()), work(Type::f32, s.work(true));
        Tensor da(Type::f32, d->da_before), ddt(Type::f32, d->ddt_before), dskip(Type::f32, d->dskip_before);
        if (d->ssd())
            cpu_kernels().ssd_grad(s, dy.src(), in.src(), p.src(), a.src(), dt.src(), skip.src(), dc.dst(), dp.dst(),
                                   da.f32(), ddt.f32(), dskip.f32(), work.f32(), nullptr);
        else
            cpu_kernels().delta_rule_grad(s, dy.src(), in.src(), p.src(), a.src(), dt.src(), dc.dst(), dp.dst(),
                                          da.f32(), ddt.f32(), work.f32(), nullptr);
        const std::int64_t gates = s.gates(), n = s.gate_columns();
        return worst({relative_error(d->dc, dc.values()),
                      relative_error(d->columns(d->dp.values(), gates, n), d->columns(dp.values(), gates, n)),
                      relative_error(d->da_log, da.values()), relative_error(d->ddt_bias, ddt.values()),
                      relative_error(d->dskip, dskip.values())});
    };
    return c;
}

// Sequences within a chunk, to its end, and beyond; wide and narrow heads, key heads of one or more value heads.
const std::vector<StateShape>& shapes() {
    static const std::vector<StateShape> all{
        {7, 1, 1, 1, 3, 5, 4}, {64, 1, 1, 2, 6, 4, 4}, {150, 2, 2, 4, 3, 2, 3}, {140, 1, 1, 1, 4, 9, 1, 1e-6, 1, 3}};
    return all;
}

// Shapes of Mamba-2: groups of one or more heads, states wider than what a block of a GPU holds at once.
StateShape mamba(StateShape s, float step_min = 0.0f, float step_max = std::numeric_limits<float>::infinity()) {
    s.rule = StateRule::ssd;
    s.step_min = step_min, s.step_max = step_max;
    return s;
}

const std::vector<StateShape>& mamba_shapes() {
    static const std::vector<StateShape> all{mamba({7, 1, 1, 1, 3, 5, 4}), mamba({64, 1, 1, 2, 6, 4, 4}),
                                             mamba({150, 2, 2, 4, 3, 2, 3}, 0.3f, 1.2f),
                                             mamba({140, 1, 1, 2, 4, 3, 1, 1e-6, 1, 3}, 0.01f)};
    return all;
}

} // namespace

TEST_CASE("short_conv: any taps, documents, channels of a part of the heads") {
    for (const Type type : {Type::f32, Type::bf16})
        for (const bool grad : {false, true})
            for (const StateShape& s : {shapes()[0], StateShape{40, 2, 2, 4, 3, 2, 3},
                                        StateShape{70, 1, 1, 1, 4, 3, 1, 1e-6, 1, 3}, StateShape{3, 1, 1, 1, 2, 2, 8},
                                        mamba({40, 2, 2, 4, 3, 2, 3}), mamba({70, 1, 1, 1, 4, 3, 2, 1e-6, 1, 3}),
                                        StateShape{70, 1, 1, 4, 8, 8, 4}, mamba({36, 2, 1, 8, 8, 8, 3})}) // whole packs
                for (const int documents : {0, 4}) check(conv_case(grad, s, {documents, type}));
}

TEST_CASE("gated_norm: heads of any width") {
    for (const Type type : {Type::f32, Type::bf16})
        for (const bool grad : {false, true})
            for (const StateShape& s :
                 {shapes()[0], StateShape{6, 1, 1, 3, 2, 40, 2}, StateShape{3, 1, 1, 2, 2, 128, 2},
                  StateShape{5, 1, 1, 4, 4, 40, 2}, StateShape{3, 1, 1, 4, 4, 128, 2}}) // whole packs
                check(norm_case(grad, s, {0, type}));
}

TEST_CASE("gated_norm: groups of heads of any width, behind their gates") {
    for (const Type type : {Type::f32, Type::bf16})
        for (const bool grad : {false, true})
            for (const StateShape& s :
                 {StateShape{7, 1, 1, 1, 3, 5, 4}, StateShape{6, 1, 2, 6, 2, 40, 2},
                  StateShape{3, 1, 2, 6, 2, 128, 2, 1e-5, 1, 2}, StateShape{20, 2, 3, 3, 2, 4, 2},
                  StateShape{3, 1, 2, 8, 8, 32, 2, 1e-5, 1, 2}, StateShape{2, 1, 1, 8, 8, 64, 2},
                  StateShape{1, 1, 1, 16, 8, 64, 2}, StateShape{1, 1, 1, 32, 8, 64, 2}}) // whole packs of either kind
                check(norm_case(grad, mamba(s), {0, type}));
    check(norm_case(false, mamba({3, 1, 1, 40, 2, 128, 2}), {0, Type::f32})); // as wide as Granite 4 has them, and more
    check(norm_case(true, mamba({2, 1, 1, 64, 2, 70, 2}), {0, Type::f32}));
}

TEST_CASE("ssd: the chunks' result is the recurrence's, within and across chunks, with documents") {
    for (const Type type : {Type::f32, Type::bf16})
        for (const int documents : {0, 5}) {
            for (const StateShape& s : mamba_shapes()) check(rule_case(false, s, {documents, type}));
            check(rule_case(false, mamba({130, 1, 1, 2, 256, 64, 4}), {documents, type}));
            check(rule_case(false, mamba({130, 1, 1, 2, 100, 128, 4}), {documents, type}));
        }
}

// In BF16 the tensor cores' kernels: whole chunks and a part of one, packs that fill no tile, blocks that share a
// group.
TEST_CASE("ssd: heads of whole packs, over several chunks") {
    for (const int documents : {0, 5})
        for (const StateShape& s : {mamba({256, 1, 1, 2, 128, 64, 4}), mamba({2 * 129, 2, 1, 3, 24, 80, 4}, 0.3f, 1.2f),
                                    mamba({300, 1, 2, 4, 136, 128, 4}), mamba({140, 1, 1, 20, 40, 16, 4, 1e-6, 1, 2})})
            check(rule_case(false, s, {documents, Type::bf16}));
}

TEST_CASE("ssd: gradients of all operands, within and across chunks, with documents") {
    for (const int documents : {0, 5}) {
        for (const StateShape& s : mamba_shapes()) check(rule_case(true, s, {documents, Type::f32}));
        check(rule_case(true, mamba_shapes()[1], {documents, Type::bf16}));
    }
}

// Differences of wide heads would take minutes: the reference is the CPU's kernel in FP32. Three cases, since racecheck
// takes more than 42 s for all of them.
TEST_CASE("ssd: gradients of wide heads are the CPU's in FP32") {
    for (const StateShape& shape :
         {mamba({2 * 130, 2, 1, 2, 128, 64, 4}), mamba({384, 1, 1, 3, 128, 64, 4}), mamba({300, 1, 1, 3, 128, 80, 4}),
          mamba({100, 1, 2, 4, 24, 80, 4}, 0.3f, 1.2f), mamba({300, 1, 1, 2, 72, 128, 4, 1e-6, 1, 2})})
        for (const int documents : {0, 5}) check(wide_grad_case(shape, documents));
}

TEST_CASE("ssd: gradients of many heads of a group are the CPU's in FP32") {
    for (const int documents : {0, 5}) check(wide_grad_case(mamba({256, 1, 1, 40, 64, 64, 4}), documents));
}

TEST_CASE("ssd: gradients of states of more than 128 rows are the CPU's in FP32") {
    for (const StateShape& shape : {mamba({130, 1, 2, 4, 256, 128, 4}), mamba({300, 1, 1, 18, 256, 64, 4}),
                                    mamba({2 * 130, 2, 2, 4, 136, 48, 4})})
        for (const int documents : {0, 5}) check(wide_grad_case(shape, documents));
}

TEST_CASE("delta_rule: the chunks' result is the recurrence's, within and across chunks, with documents") {
    for (const Type type : {Type::f32, Type::bf16})
        for (const int documents : {0, 5}) {
            for (const StateShape& s : shapes()) check(rule_case(false, s, {documents, type}));
            check(rule_case(false, {130, 1, 1, 2, 128, 128, 4}, {documents, type}));
        }
}

TEST_CASE("delta_rule: gradients of all operands, within and across chunks, with documents") {
    for (const int documents : {0, 5}) {
        for (const StateShape& s : shapes()) check(rule_case(true, s, {documents, Type::f32}));
        check(rule_case(true, shapes()[1], {documents, Type::bf16}));
    }
}

// Differences of heads of 128 columns would take minutes: the reference is the CPU's kernel in FP32.
TEST_CASE("delta_rule: gradients of heads of 128 columns are the CPU's in FP32") {
    for (const int documents : {0, 5}) check(wide_grad_case({2 * 130, 2, 1, 2, 128, 128, 4}, documents));
}

TEST_CASE("delta_cached, ssd_cached: one row after another is the whole sequence") {
    for (const Type type : {Type::f32, Type::bf16}) {
        check(cached_case(mamba({9, 1, 1, 2, 6, 4, 4}), type));
        check(cached_case(mamba({5, 1, 2, 2, 3, 40, 1}, 0.5f, 0.9f), type));
        check(cached_case({9, 1, 1, 2, 6, 4, 4}, type));
        check(cached_case({5, 1, 2, 2, 3, 40, 1}, type));
    }
}

std::vector<Case> state_benchmarks() {
    const StateShape qwen{2048, 1, 16, 32, 128, 128, 4}; // of Qwen3-Next
    StateShape nemotron{2048, 1, 8, 64, 128, 64, 4};     // of Nemotron 3 Nano
    nemotron.rule = StateRule::ssd;
    std::vector<Case> list;
    for (const bool grad : {false, true})
        for (const StateShape& layer : {qwen, nemotron}) {
            list.push_back(conv_case(grad, layer, {0, Type::bf16}));
            list.push_back(rule_case(grad, layer, {0, Type::bf16}));
            list.push_back(norm_case(grad, layer, {0, Type::bf16}));
        }
    return list;
}

} // namespace moe::test
