// Kernels that move whole packs of routed rows: biases and activations of experts, permutation, places and choice.
#include "tests/kernels/cuda_packs.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace moe::test {
namespace {

void biases(std::int64_t cols, Type type, Type bias, Type results, std::int64_t skipped) {
    const Index counts{70, 0, 3, 130};
    const std::int64_t rows = 203, capacity = 220;
    const std::string name = named("biases", rows, cols, {type, bias, results}) + fmt::format(" +{}", skipped);
    Random random(name);
    const Shifted x(random.tensor(type, capacity * cols + skipped), skipped);
    const Tensor b = random.tensor(bias, 4 * cols), p = random.tensor(Type::f32, capacity),
                 before = random.tensor(Type::f32, 4 * cols);
    compare(name, [&](const Kernels& k) {
        Tensor y(results, rows * cols),
            db = before, grouped(results, Vec(static_cast<std::size_t>(capacity * cols), 0.0)), gdb = before,
            dp(Type::f32, Vec(static_cast<std::size_t>(capacity), 0.0)), plain = before;
        k.bias_add(x.src(), b.src(), y.dst(), rows, cols, nullptr);
        k.bias_grad(x.src(), db.f32(), rows, cols, nullptr);
        k.grouped_bias_add(x.src(), b.src(), counts.data(), p.f32(), grouped.dst(), 4, cols, capacity, 0.5f, nullptr);
        k.grouped_bias_grad(x.src(), counts.data(), b.src(), p.f32(), gdb.f32(), dp.f32(), 4, cols, capacity, 0.5f,
                            nullptr);
        k.grouped_bias_grad(x.src(), counts.data(), b.src(), nullptr, plain.f32(), nullptr, 4, cols, capacity, 1.0f,
                            nullptr);
        return Outputs{y, db, grouped, gdb, dp, plain};
    });
}

void activations(std::int64_t ffn, Type type, Type results, const ActivationShape& form, std::int64_t skipped) {
    const std::int64_t rows = 37;
    const std::string name = named("activation", rows, ffn, {type, results}) +
                             fmt::format(" {}{} limit {} +{}", static_cast<int>(form.curve), form.gated ? " gated" : "",
                                         form.limit, skipped);
    ActivationShape s = form;
    s.rows = rows, s.ffn = ffn, s.groups = 3;
    const std::int64_t width = form.gated ? 2 * ffn : ffn;
    const Index counts{12, 0, 20};
    Random random(name);
    const Shifted x(random.tensor(type, rows * width + skipped, 2.0), skipped),
        dy(random.tensor(type, rows * ffn + skipped), skipped);
    const Tensor p = random.tensor(Type::f32, rows), gate = random.tensor(type, rows);
    compare(name, [&](const Kernels& k) {
        const auto zeros = [](Type t, std::int64_t n) { return Tensor(t, Vec(static_cast<std::size_t>(n), 0.0)); };
        Tensor y = zeros(results, rows * ffn), dx = zeros(results, rows * width), dp = zeros(Type::f32, rows);
        Tensor all(results, rows * ffn), scaled = y, dscaled = y, dp2 = dp, out(results, rows * ffn), dout = out,
                                         dg(type, rows);
        k.activation(s, x.src(), p.f32(), counts.data(), y.dst(), {}, nullptr);
        k.activation_grad(s, dy.src(), x.src(), p.f32(), counts.data(), dx.dst(), dp.f32(), {}, {}, nullptr);
        k.activation(s, x.src(), nullptr, nullptr, all.dst(), {}, nullptr);
        k.scale_rows(dy.src(), p.f32(), counts.data(), scaled.dst(), 3, rows, ffn, nullptr);
        k.scale_rows_grad(dy.src(), x.src(), p.f32(), counts.data(), dscaled.dst(), dp2.f32(), 3, rows, ffn, nullptr);
        k.sigmoid_scale(dy.src(), gate.src(), out.dst(), rows, ffn, false, nullptr);
        k.sigmoid_scale_grad(dy.src(), x.src(), gate.src(), dout.dst(), dg.dst(), rows, ffn, false, nullptr);
        return Outputs{y, dx, dp, all, scaled, dscaled, dp2, out, dout, dg};
    });
}

void moves(std::int64_t cols, int top_k, Type from, Type to, std::int64_t skipped) {
    const std::int64_t tokens = 21, copies = tokens * top_k;
    const int experts = 12;
    const std::string name = named("permute", tokens, cols, {from, to}) + fmt::format(" top {} +{}", top_k, skipped);
    Random random(name);
    Index index;
    for (std::int64_t t = 0; t < tokens; ++t) // distinct experts, the seventh copy dropped
        for (int i = 0; i < top_k; ++i)
            index.push_back(t * top_k + i == 7 ? -1 : static_cast<std::int32_t>((t * 5 + i) % experts));
    Index counts(experts), row_of(static_cast<std::size_t>(copies));
    cpu_kernels().permute_map(index.data(), counts.data(), row_of.data(), nullptr, tokens, top_k, experts, 0, nullptr);
    const Shifted x(random.tensor(from, copies * cols + skipped), skipped);
    compare(name, [&](const Kernels& k) {
        PermuteShape s;
        s.tokens = tokens, s.cols = cols, s.top_k = top_k;
        PermuteShape single = s;
        single.per_copy = true;
        const Tensor none(to, Vec(static_cast<std::size_t>(copies * cols), 0.0));
        Tensor rows = none, each = none, summed(to, tokens * cols), back = none;
        k.permute(s, x.src(), row_of.data(), rows.dst(), nullptr);
        k.permute(single, x.src(), row_of.data(), each.dst(), nullptr);
        k.unpermute(s, x.src(), row_of.data(), summed.dst(), nullptr);
        k.unpermute(single, x.src(), row_of.data(), back.dst(), nullptr);
        return Outputs{rows, each, summed, back};
    });
}

// Scores + bias of a row, in double.
Vec weighed(const RouterShape& s, const Vec& logits, const Vec& bias) {
    Vec out = logits;
    double sum = 1.0;
    if (s.score == Score::softmax && !s.softmax_after_top_k) {
        const double largest = *std::max_element(out.begin(), out.end());
        sum = 0.0;
        for (double& x : out) sum += x = std::exp(x - largest);
    }
    for (std::size_t e = 0; e < out.size(); ++e) {
        double& x = out[e];
        if (s.score == Score::sigmoid) x = 1.0 / (1.0 + std::exp(-x));
        if (s.score == Score::sqrt_softplus) x = std::sqrt(std::log1p(std::exp(x)));
        x = x / sum + bias[e];
    }
    return out;
}

// True where two values next to each other among the best `count` and the one behind them differ by so little that it
// is a matter of rounding which of them is before the other: four units of the last place of sums up to 4.
bool undecided(Vec values, int count) {
    std::sort(values.rbegin(), values.rend());
    for (std::size_t i = 0; i < static_cast<std::size_t>(count) && i + 1 < values.size(); ++i)
        if (values[i] != values[i + 1] && values[i] - values[i + 1] < 2e-6) return true;
    return false;
}
bool undecided(const RouterShape& s, const Vec& logits, const Vec& bias) {
    const Vec all = weighed(s, logits, bias);
    Vec groups, eligible;
    for (auto at = all.begin(); at != all.end(); at += s.experts / s.groups) {
        Vec group(at, at + s.experts / s.groups);
        std::sort(group.rbegin(), group.rend());
        groups.push_back(std::accumulate(group.begin(), group.begin() + s.group_score_top, 0.0));
    }
    Vec order = groups;
    std::sort(order.rbegin(), order.rend());
    const double least = order[static_cast<std::size_t>(s.groups_kept - 1)];
    for (std::size_t e = 0; e < all.size(); ++e)
        if (groups[e / (all.size() / groups.size())] >= least) eligible.push_back(all[e]);
    return undecided(groups, s.groups_kept) || undecided(eligible, s.top_k);
}

// Logits that leave no row undecided: such a row is like the one before it.
Tensor decided(const RouterShape& s, Type type, Random& random, const Vec& bias) {
    Vec logits = random.tensor(type, s.tokens * s.experts).values();
    Vec before(static_cast<std::size_t>(s.experts));
    for (std::size_t e = 0; e < before.size(); ++e) before[e] = static_cast<double>(e) / 64.0; // BF16 holds them
    for (auto at = logits.begin(); at != logits.end(); at += s.experts) {
        const Vec row(at, at + s.experts);
        if (undecided(s, row, bias)) {
            std::copy(before.begin(), before.end(), at);
        } else {
            before = row;
        }
    }
    return Tensor(type, logits);
}

} // namespace

TEST_CASE("packs: biases and their gradients by expert") {
    for (const Type type : storages)
        for (const Type bias : storages) {
            for (const std::int64_t cols : {64, 520}) biases(cols, type, bias, type, 0);
            biases(520, type, bias, type == Type::f32 ? Type::bf16 : Type::f32, 0);
            biases(64, type, bias, type, 1);
        }
}

TEST_CASE("packs: activations, scaled rows, sigmoid gates") {
    for (const Type type : storages) {
        for (const bool gated : {true, false})
            for (const Curve curve : {Curve::silu, Curve::gelu, Curve::quick_gelu, Curve::relu2}) {
                ActivationShape form;
                form.curve = curve, form.gated = gated;
                activations(776, type, type, form, 0);
                form.limit = gated ? 1.5 : 0.0;
                activations(64, type, type, form, 0);
            }
        activations(776, type, type, {}, 1);
        activations(776, type, type == Type::f32 ? Type::bf16 : Type::f32, {}, 0);
    }
}

TEST_CASE("packs: permute and unpermute, fewer and more copies than move together") {
    for (const Type from : storages)
        for (const Type to : storages)
            for (const int top_k : {1, 2, 8, 11}) {
                moves(296, top_k, from, to, 0);
                moves(64, top_k, from, to, 1);
                moves(5, top_k, from, to, 0);
            }
}

TEST_CASE("packs: places of many copies, dropped ones, experts without any, padded buffers") {
    const auto& k = table();
    for (const int experts : {1, 3, 128, 300, 600})
        for (const std::int64_t tokens : {100, 2500, 20000, 40000, 70000}) // blocks have 1 to 8 strips of copies
            for (const std::int64_t padded : {0, 9000}) {
                Random random(fmt::format("places {} {} {}", experts, tokens, padded));
                INFO(experts, " experts, ", tokens, " tokens, padded ", padded);
                Index index = random.indices(tokens * 8, experts);
                for (std::int32_t& e : index)
                    if (e == 1 || random.below(9) == 0) e = -1;
                Index counts[2] = {Index(static_cast<std::size_t>(experts), 7),
                                   Index(static_cast<std::size_t>(experts), 7)};
                Index row_of[2] = {Index(index.size(), 7), Index(index.size(), 7)}, filled[2] = {counts[0], counts[1]};
                for (const int device : {0, 1})
                    (device != 0 ? k : cpu_kernels())
                        .permute_map(index.data(), counts[device].data(), row_of[device].data(),
                                     padded > 0 ? filled[device].data() : nullptr, tokens, 8, experts, padded, nullptr);
                CHECK(counts[0] == counts[1]);
                CHECK(row_of[0] == row_of[1]);
                CHECK(filled[0] == filled[1]);
            }
}

TEST_CASE("packs: router over few and many experts of a lane, groups of whole lanes and others") {
    struct Size {
        std::int64_t tokens; // with many logits a lane has more experts
        int experts, groups, kept, top;
    };
    for (const Type type : storages)
        for (const Score score : {Score::softmax, Score::sigmoid, Score::sqrt_softplus})
            for (const auto& [tokens, experts, groups, kept, top] :
                 {Size{37, 128, 1, 1, 1},   Size{37, 256, 8, 4, 2},   Size{37, 160, 8, 3, 1},
                  Size{37, 384, 1, 1, 1},   Size{37, 512, 4, 1, 2},   Size{37, 600, 1, 1, 1},
                  Size{37, 64, 2, 1, 2},    Size{37, 64, 8, 3, 2},    Size{37, 16, 4, 2, 2},
                  Size{37, 24, 8, 4, 2},    Size{37, 240, 12, 4, 2},  Size{2111, 128, 1, 1, 1},
                  Size{2111, 128, 8, 2, 1}, Size{4111, 256, 8, 4, 2}, Size{2111, 160, 8, 3, 1},
                  Size{16411, 64, 1, 1, 1}, Size{8200, 128, 1, 1, 1}, Size{4116, 256, 8, 4, 2},
                  Size{6556, 160, 1, 1, 1}, Size{2732, 384, 1, 1, 1}}) {               // whole tokens, the last four
                if (type != Type::f32 && (tokens == 6556 || tokens == 2732)) continue; // as in others
                RouterShape s;
                s.tokens = tokens, s.experts = experts, s.top_k = 6, s.score = score, s.normalize = experts != 64;
                s.groups = groups, s.groups_kept = kept, s.group_score_top = top, s.scale = 2.5;
                s.softmax_after_top_k = experts == 384;
                const std::string name =
                    named("router", s.tokens, experts, {type}) +
                    fmt::format(" {} of {} groups, score {}", kept, groups, static_cast<int>(score));
                Random random(name);
                const Tensor bias = random.tensor(type, experts, 0.1), logits = decided(s, type, random, bias.values()),
                             dweight = random.tensor(Type::f32, s.tokens * s.top_k);
                Index first;
                compare(name, [&](const Kernels& k) {
                    Index index(static_cast<std::size_t>(s.tokens * s.top_k), -1);
                    Tensor weight(Type::f32, s.tokens * s.top_k), dlogits(type, s.tokens * experts);
                    k.router(s, logits.src(), bias.src(), {}, index.data(), weight.f32(), nullptr);
                    k.router_grad(s, dweight.f32(), logits.src(), index.data(), dlogits.dst(), nullptr);
                    if (first.empty()) first = index;
                    CHECK(index == first);
                    return Outputs{weight, dlogits};
                });
            }
}

TEST_CASE("packs: router where many scores are equal, with few and many chosen") {
    struct Size {
        std::int64_t tokens;
        int experts, top_k, groups, kept, top;
    };
    for (const Type type : storages)
        for (const Score score : {Score::softmax, Score::sigmoid})
            for (const auto& [tokens, experts, top_k, groups, kept, top] :
                 {Size{301, 128, 8, 1, 1, 1},  Size{301, 512, 10, 1, 1, 1},
                  Size{301, 64, 3, 1, 1, 1},   Size{301, 33, 16, 1, 1, 1},
                  Size{301, 128, 20, 1, 1, 1}, Size{301, 256, 8, 4, 2, 2},
                  Size{301, 96, 6, 3, 2, 2},   Size{301, 160, 6, 8, 3, 1},
                  Size{301, 24, 4, 8, 3, 1},   Size{301, 16, 4, 16, 8, 2},
                  Size{301, 8, 2, 1, 1, 1},    Size{301, 16, 8, 1, 1, 1},
                  Size{4111, 128, 8, 1, 1, 1}, Size{8211, 128, 8, 1, 1, 1},
                  Size{8200, 128, 8, 1, 1, 1}, Size{4116, 256, 8, 4, 2, 2},
                  Size{4116, 256, 8, 4, 2, 1}, Size{13112, 80, 8, 1, 1, 1},
                  Size{6556, 160, 6, 8, 3, 1}, Size{6556, 160, 8, 1, 1, 1},
                  Size{5464, 192, 8, 1, 1, 1}, Size{2732, 384, 8, 1, 1, 1},
                  Size{64, 32, 10, 1, 1, 1},   Size{64, 64, 10, 1, 1, 1},
                  Size{64, 128, 10, 1, 1, 1},  Size{64, 256, 10, 8, 4, 2},
                  Size{64, 512, 10, 1, 1, 1}}) { // whole tokens, the last
                RouterShape s;
                s.tokens = tokens, s.experts = experts, s.top_k = top_k, s.score = score, s.normalize = true;
                s.groups = groups, s.groups_kept = kept, s.group_score_top = top;
                const std::string name = named("router", s.tokens, experts, {type}) +
                                         fmt::format(" top {} of equal scores {}, {} of {} groups by {}", top_k,
                                                     static_cast<int>(score), kept, groups, top);
                Random random(name);
                Vec quarters = random.normal(s.tokens * experts);
                for (double& x : quarters) x = std::round(4.0 * x) / 4.0;
                const Tensor logits(type, quarters), dweight = random.tensor(Type::f32, s.tokens * top_k);
                Index first;
                compare(name, [&](const Kernels& k) {
                    Index index(static_cast<std::size_t>(s.tokens * top_k), -1);
                    Tensor weight(Type::f32, s.tokens * top_k), dlogits(type, s.tokens * experts);
                    k.router(s, logits.src(), {}, {}, index.data(), weight.f32(), nullptr);
                    k.router_grad(s, dweight.f32(), logits.src(), index.data(), dlogits.dst(), nullptr);
                    if (first.empty()) first = index;
                    CHECK(index == first);
                    return Outputs{weight, dlogits};
                });
            }
}

} // namespace moe::test
