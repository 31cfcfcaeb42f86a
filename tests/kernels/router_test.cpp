// The router against a sort in double; its gradient against central differences with the choice held fixed.
#include "tests/kernels/case.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace moe::test {
namespace {

const char* name_of(Score score) {
    const char* names[] = {"softmax", "sigmoid", "sqrt_softplus"};
    return names[static_cast<int>(score)];
}

Vec softmax(Vec x) {
    const double best = *std::max_element(x.begin(), x.end());
    double sum = 0.0;
    for (double& v : x) sum += v = std::exp(v - best);
    for (double& v : x) v /= sum;
    return x;
}

Vec scores_of(const RouterShape& s, const Vec& logits) {
    if (s.softmax_after_top_k) return logits;
    if (s.score == Score::softmax) return softmax(logits);
    Vec out;
    for (const double x : logits)
        out.push_back(s.score == Score::sigmoid ? 1.0 / (1.0 + std::exp(-x)) : std::sqrt(std::log1p(std::exp(x))));
    return out;
}

// Numbers of the k largest, largest first, equal ones by lower number.
Index largest(const Vec& values, int k) {
    Index order(values.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
        return values[static_cast<std::size_t>(a)] > values[static_cast<std::size_t>(b)];
    });
    order.resize(static_cast<std::size_t>(k));
    return order;
}

Index choose(const RouterShape& s, const Vec& logits, const Vec& bias) {
    // The order of the scores is that of the logits where only it counts; logits differ where scores saturate.
    const bool ordered = bias.empty() && (s.groups_kept == s.groups || s.group_score_top == 1 || s.groups == s.experts);
    Vec choice = ordered ? logits : scores_of(s, logits);
    if (!bias.empty()) choice = plus(choice, bias);
    if (s.groups_kept == s.groups) return largest(choice, s.top_k);
    const auto size = static_cast<std::size_t>(s.experts / s.groups);
    Vec group_scores;
    for (std::size_t g = 0; g < static_cast<std::size_t>(s.groups); ++g) {
        Vec members(choice.begin() + static_cast<std::ptrdiff_t>(g * size),
                    choice.begin() + static_cast<std::ptrdiff_t>((g + 1) * size));
        std::sort(members.rbegin(), members.rend());
        const auto counted = static_cast<std::ptrdiff_t>(std::min(static_cast<std::size_t>(s.group_score_top), size));
        group_scores.push_back(std::accumulate(members.begin(), members.begin() + counted, 0.0));
    }
    const Index kept = largest(group_scores, s.groups_kept);
    for (std::size_t e = 0; e < choice.size(); ++e) {
        if (std::find(kept.begin(), kept.end(), static_cast<int>(e / size)) == kept.end()) choice[e] = -1e300;
    }
    return largest(choice, s.top_k);
}

// Of the sparse mixer: the shares of experts chosen one after another.
Vec mixed(const RouterShape& s, const Vec& logits, const std::int32_t* index) {
    Vec out;
    std::vector<bool> taken(logits.size(), false);
    for (int k = 0; k < s.top_k; ++k) {
        const auto best = static_cast<std::size_t>(index[k]);
        double sum = 0.0;
        for (std::size_t e = 0; e < logits.size(); ++e) {
            const double far = (logits[best] - logits[e]) / std::max(std::abs(logits[e]), logits[best]);
            if (!taken[e] && !(far > 2.0 * s.mixer)) sum += std::exp(logits[e] - logits[best]);
        }
        out.push_back(s.scale / sum);
        taken[best] = true;
    }
    return out;
}

Vec weights_of(const RouterShape& s, const Vec& logits, const std::int32_t* index) {
    if (s.mixer > 0.0) return mixed(s, logits, index);
    const Vec score = scores_of(s, logits);
    Vec out;
    for (int k = 0; k < s.top_k; ++k) out.push_back(score[static_cast<std::size_t>(index[k])]);
    if (s.softmax_after_top_k) {
        out = softmax(out);
    } else if (s.normalize) {
        const double sum = std::accumulate(out.begin(), out.end(), 1e-20);
        for (double& w : out) w /= sum;
    }
    for (double& w : out) w *= s.scale;
    return out;
}

struct RouterData {
    RouterShape s;
    bool biased;
    Tensor logits, bias, weight, dweight, dlogits;
    Index index;
    Vec row(std::int64_t t) const { return logits.values(t * s.experts, s.experts); }
    void run() {
        table().router(s, logits.src(), biased ? bias.src() : Src{}, {}, index.data(), weight.f32(), nullptr);
    }
};

// Logits are multiples of 1/8, so that ties occur and BF16 holds them exactly; the bias breaks none of them by
// rounding.
Case router_case(bool grad, RouterShape s, bool biased, Type type) {
    Case out;
    out.name = fmt::format("router{} {} tokens {} experts {} top {} groups {}/{} by {}{}{}{} {}", grad ? "_grad" : "",
                           name_of(s.score), s.tokens, s.experts, s.top_k, s.groups_kept, s.groups, s.group_score_top,
                           s.softmax_after_top_k ? " after" : "",
                           s.normalize     ? " normalised"
                           : s.mixer > 0.0 ? " mixed"
                                           : "",
                           biased ? " bias" : "", test::name_of(type));
    Random random(out.name);
    Vec logits = random.normal(s.tokens * s.experts), bias = random.normal(s.experts, 0.25);
    for (double& x : logits) x = std::round(x * 8.0) / 8.0;
    auto d = std::make_shared<RouterData>(
        RouterData{s, biased, Tensor(type, logits), Tensor(Type::f32, bias), Tensor(Type::f32, s.tokens * s.top_k),
                   random.tensor(Type::f32, s.tokens * s.top_k), Tensor(type, s.tokens * s.experts),
                   Index(static_cast<std::size_t>(s.tokens * s.top_k), -7)});
    out.tolerance = grad ? tolerance(type) : f32_tolerance;
    out.flops = 8.0 * static_cast<double>(s.tokens * s.experts);
    out.bytes = static_cast<double>(s.tokens * s.experts) * static_cast<double>(size_of(type)) * (grad ? 2.0 : 1.0) +
                8.0 * static_cast<double>(s.tokens * s.top_k);
    if (!grad) {
        out.call = [d] { d->run(); };
        out.error = [d] {
            double error = 0.0;
            for (std::int64_t t = 0; t < d->s.tokens; ++t) {
                const Index want = choose(d->s, d->row(t), d->biased ? d->bias.values() : Vec{});
                const std::int32_t* got = d->index.data() + t * d->s.top_k;
                error = worst({error, demand(std::equal(want.begin(), want.end(), got)),
                               relative_error(d->weight.values(t * d->s.top_k, d->s.top_k),
                                              weights_of(d->s, d->row(t), want.data()))});
            }
            return error;
        };
        return out;
    }
    d->run();
    out.call = [d] {
        table().router_grad(d->s, d->dweight.f32(), d->logits.src(), d->index.data(), d->dlogits.dst(), nullptr);
    };
    out.error = [d] {
        Vec want;
        for (std::int64_t t = 0; t < d->s.tokens; ++t) {
            const std::int32_t* index = d->index.data() + t * d->s.top_k;
            const Vec g = gradient([&](const Vec& at) { return weights_of(d->s, at, index); }, d->row(t),
                                   d->dweight.values(t * d->s.top_k, d->s.top_k));
            want.insert(want.end(), g.begin(), g.end());
        }
        return relative_error(d->dlogits, want);
    };
    return out;
}

RouterShape shape(std::int64_t tokens, int experts, int top_k, Score score, bool normalize = false,
                  double scale = 1.0) {
    RouterShape s;
    s.tokens = tokens, s.experts = experts, s.top_k = top_k, s.score = score, s.normalize = normalize, s.scale = scale;
    return s;
}

RouterShape grouped(RouterShape s, int groups, int kept, int top) {
    s.groups = groups, s.groups_kept = kept, s.group_score_top = top;
    return s;
}

} // namespace

TEST_CASE("router and its gradient: scores, normalisation, bias, groups") {
    for (const bool grad : {false, true}) {
        for (const Type type : {Type::f32, Type::bf16}) {
            for (const Score score : {Score::softmax, Score::sigmoid, Score::sqrt_softplus}) {
                for (const bool normalize : {false, true}) {
                    check(router_case(grad, shape(9, 8, 2, score, normalize), false, type));
                    check(router_case(grad, shape(5, 13, 4, score, normalize, 2.5), true, type));
                    check(router_case(grad, shape(3, 4, 1, score, normalize), false, type));
                    check(router_case(grad, shape(3, 4, 4, score, normalize), true, type));
                    check(router_case(grad, grouped(shape(11, 16, 3, score, normalize, 2.5), 4, 2, 2), true, type));
                    check(router_case(grad, grouped(shape(11, 12, 4, score, normalize), 4, 2, 1), false, type));
                }
            }
            RouterShape after = shape(9, 8, 3, Score::softmax);
            after.softmax_after_top_k = true;
            check(router_case(grad, after, false, type));
            after.normalize = true, after.scale = 1.5;
            check(router_case(grad, after, false, type));
            // The bound of what is near lies between multiples of 1/8, as the logits' differences are.
            for (const RouterShape& plain : {shape(9, 8, 2, Score::softmax), shape(7, 40, 3, Score::softmax)}) {
                RouterShape mix = plain;
                mix.mixer = 0.31, mix.scale = 1.5;
                check(router_case(grad, mix, false, type));
            }
        }
    }
}

TEST_CASE("expert_scale: a factor of each expert, none where a copy is dropped, and both gradients") {
    constexpr int experts = 5, n = 700;
    Random random("expert_scale");
    Index index(n);
    for (std::int32_t& e : index) e = random.below(experts + 1) - 1;
    for (const Type type : {Type::f32, Type::bf16}) {
        const Tensor weight = random.tensor(Type::f32, n), dscaled = random.tensor(Type::f32, n),
                     factor = random.tensor(type, experts);
        Tensor scaled(Type::f32, n), dweight(Type::f32, n), dfactor(Type::f32, Vec(experts, 0.25));
        Vec want, dwant, dsum(experts, 0.25);
        for (std::size_t i = 0; i < n; ++i) {
            const auto e = static_cast<std::size_t>(std::max(index[i], 0));
            const double by = index[i] < 0 ? 0.0 : factor.values()[e];
            want.push_back(weight.values()[i] * by);
            dwant.push_back(dscaled.values()[i] * by);
            if (index[i] >= 0) dsum[e] += dscaled.values()[i] * weight.values()[i];
        }
        table().expert_scale(weight.f32(), index.data(), factor.src(), scaled.f32(), n, experts, nullptr);
        CHECK(relative_error(scaled, want) <= f32_tolerance);
        table().expert_scale_grad(dscaled.f32(), weight.f32(), index.data(), factor.src(), dweight.f32(), dfactor.f32(),
                                  n, experts, nullptr);
        CHECK(relative_error(dweight, dwant) <= f32_tolerance);
        CHECK(relative_error(dfactor, dsum) <= 1e-5);
    }
}

TEST_CASE("router: ties go to the lower expert and to the lower group") {
    const Tensor logits(Type::f32, Vec(8, 0.5));
    Tensor weight(Type::f32, 3);
    Index index(3, -1);
    table().router(shape(1, 8, 3, Score::sigmoid, true), logits.src(), {}, {}, index.data(), weight.f32(), nullptr);
    CHECK(index == Index{0, 1, 2});
    table().router(grouped(shape(1, 8, 3, Score::sigmoid, true), 4, 2, 2), logits.src(), {}, {}, index.data(),
                   weight.f32(), nullptr);
    CHECK(index == Index{0, 1, 2});
}

TEST_CASE("router: equal logits tie wherever they stand in a row of any length") {
    for (const Score score : {Score::softmax, Score::sigmoid, Score::sqrt_softplus}) {
        for (int experts = 2; experts < 40; ++experts) {
            Random random("ties");
            Vec logits = random.normal(experts);
            for (double& x : logits) x = std::min(x, 1.0);
            const int first = random.below(experts - 1), second = first + 1 + random.below(experts - 1 - first);
            logits[static_cast<std::size_t>(first)] = logits[static_cast<std::size_t>(second)] = 1.3;
            const Tensor row(Type::f32, logits);
            Tensor weight(Type::f32, 2);
            Index index(2, -1);
            table().router(shape(1, experts, 2, score), row.src(), {}, {}, index.data(), weight.f32(), nullptr);
            INFO(name_of(score), " of ", experts, " experts, MOE_TEST_SEED=", seed());
            CHECK(index == Index{first, second});
            CHECK(weight.at(0) == weight.at(1));
        }
    }
}

TEST_CASE("router: where scores saturate or underflow the larger logits are chosen") {
    for (const Score score : {Score::softmax, Score::sigmoid, Score::sqrt_softplus})
        for (const int experts : {8, 40, 128})
            for (const double lowest : {30.0, -30.0 * experts - 100.0}) {
                Index order(static_cast<std::size_t>(experts));
                std::iota(order.begin(), order.end(), 0);
                Random random("saturated");
                for (int e = experts - 1; e > 0; --e)
                    std::swap(order[static_cast<std::size_t>(e)], order[static_cast<std::size_t>(random.below(e + 1))]);
                Vec logits(order.size());
                for (std::size_t i = 0; i < order.size(); ++i)
                    logits[static_cast<std::size_t>(order[i])] = lowest + 30.0 * static_cast<double>(order.size() - i);
                const Tensor row(Type::f32, logits);
                Tensor weight(Type::f32, 6);
                Index index(6, -1);
                table().router(shape(1, experts, 6, score), row.src(), {}, {}, index.data(), weight.f32(), nullptr);
                INFO(name_of(score), " of ", experts, " experts from ", lowest);
                CHECK(index == Index(order.begin(), order.begin() + 6));
            }
}

TEST_CASE("router: where scores saturate groups go by their largest logit") {
    // Groups of two: the softmax of all but the largest logit is 0, the sigmoid of all is 1.
    const Tensor row(Type::f32, Vec{400.0, 30.0, 410.0, 31.0, 420.0, 32.0, 800.0, 33.0});
    for (const Score score : {Score::softmax, Score::sigmoid}) {
        Tensor weight(Type::f32, 3);
        Index index(3, -1);
        table().router(grouped(shape(1, 8, 3, score, true), 4, 2, 1), row.src(), {}, {}, index.data(), weight.f32(),
                       nullptr);
        CHECK(index == Index{6, 4, 7});
    }
}

TEST_CASE("router: a recorded choice is kept, in place too, and weighed by the logits") {
    const RouterShape shapes[] = {shape(5, 8, 3, Score::softmax, true), shape(5, 8, 3, Score::sigmoid, false),
                                  grouped(shape(5, 8, 3, Score::sigmoid, true), 4, 2, 2)};
    for (const RouterShape& s : shapes)
        for (const bool in_place : {false, true}) {
            Random random("recorded");
            const Tensor logits = random.tensor(Type::f32, 5 * 8);
            Index recorded;
            for (int t = 0; t < 5; ++t) recorded.insert(recorded.end(), {(t + 6) % 8, t, (t + 3) % 8});
            Index index = in_place ? recorded : Index(15, -1);
            Tensor weight(Type::f32, 15);
            table().router(s, logits.src(), {}, {nullptr, in_place ? index.data() : recorded.data()}, index.data(),
                           weight.f32(), nullptr);
            CHECK(index == recorded);
            for (std::int64_t t = 0; t < 5; ++t) {
                const Vec want = weights_of(s, logits.values(t * 8, 8), recorded.data() + t * 3);
                for (std::int64_t k = 0; k < 3; ++k)
                    CHECK(weight.at(t * 3 + k) == doctest::Approx(want[static_cast<std::size_t>(k)]).epsilon(1e-6));
            }
        }
}

TEST_CASE("router: NaN logits still choose experts that exist") {
    const Tensor logits(Type::f32, 2 * 8); // all NaN
    Tensor weight(Type::f32, 2 * 3);
    Index index(6, -1);
    table().router(grouped(shape(2, 8, 3, Score::softmax, true), 4, 2, 2), logits.src(), {}, {}, index.data(),
                   weight.f32(), nullptr);
    for (const int e : index) CHECK((e >= 0 && e < 8));
}

TEST_CASE("router: scores that underflow give finite weights and gradients") {
    for (const Score score : {Score::sigmoid, Score::sqrt_softplus}) {
        const RouterShape s = shape(1, 4, 2, score, true);
        const Tensor logits(Type::f32, Vec(4, -250.0)), dweight(Type::f32, Vec{1.0, -1.0});
        Tensor weight(Type::f32, 2), dlogits(Type::f32, 4);
        Index index(2, -1);
        table().router(s, logits.src(), {}, {}, index.data(), weight.f32(), nullptr);
        table().router_grad(s, dweight.f32(), logits.src(), index.data(), dlogits.dst(), nullptr);
        for (const double x : weight.values()) CHECK(std::isfinite(x));
        for (const double x : dlogits.values()) CHECK(std::isfinite(x));
    }
}

std::vector<Case> router_benchmarks() {
    std::vector<Case> out;
    for (const bool grad : {false, true}) {
        out.push_back(router_case(grad, shape(4096, 128, 8, Score::softmax, true), false, Type::f32));
        out.push_back(
            router_case(grad, grouped(shape(4096, 256, 8, Score::sigmoid, true, 2.5), 8, 4, 2), true, Type::f32));
    }
    return out;
}

} // namespace moe::test
