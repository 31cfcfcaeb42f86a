// Experts chosen behind Sinkhorn's iteration against the iteration in double, and what it does to their load.
#include "tests/kernels/case.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace moe::test {
namespace {

// d(e) c(t, e) of kernels/kernel_args.hpp.
Vec balanced(const SinkhornShape& s, const Vec& logits) {
    const auto experts = static_cast<std::size_t>(s.experts), tokens = static_cast<std::size_t>(s.tokens);
    Vec c(logits.size()), d(experts, 1.0);
    for (std::size_t t = 0; t < tokens; ++t) {
        const auto row = logits.begin() + static_cast<std::ptrdiff_t>(t * experts);
        const double largest = *std::max_element(row, row + s.experts);
        for (std::size_t e = 0; e < experts; ++e)
            c[t * experts + e] = std::exp(row[static_cast<std::ptrdiff_t>(e)] - largest);
    }
    for (int round = 0; round < 100; ++round) {
        Vec sums(experts, 0.0);
        for (std::size_t t = 0; t < tokens; ++t) {
            double along = 0.0;
            for (std::size_t e = 0; e < experts; ++e) along += d[e] * c[t * experts + e];
            for (std::size_t e = 0; e < experts; ++e)
                sums[e] += c[t * experts + e] / (static_cast<double>(s.tokens) * (along + 1e-8));
        }
        double change = 0.0;
        for (std::size_t e = 0; e < experts; ++e) {
            const double next = 1.0 / (s.experts * (sums[e] + 1e-8));
            change += std::abs(next - d[e]) / s.experts;
            d[e] = next;
        }
        if (change <= 1e-4) break;
    }
    for (std::size_t i = 0; i < c.size(); ++i) c[i] *= d[i % experts];
    return c;
}

// Logits of which the first experts are the best for most tokens, as of a router that has collapsed.
Vec skewed(const SinkhornShape& s, Random& random) {
    Vec logits = random.normal(s.tokens * s.experts);
    for (std::size_t i = 0; i < logits.size(); ++i)
        logits[i] += 3.0 / (1.0 + static_cast<double>(i % static_cast<std::size_t>(s.experts)));
    return logits;
}

// How far what was chosen in place k lies below the k-th best, relative to that: the worst of all.
Case sinkhorn_case(const SinkhornShape& s, Type type) {
    struct Data {
        Tensor logits;
        Index index;
    };
    Case out;
    out.name = fmt::format("sinkhorn {}x{} top {} {}", s.tokens, s.experts, s.top_k, test::name_of(type));
    Random random(out.name);
    auto d = std::make_shared<Data>(
        Data{Tensor(type, skewed(s, random)), Index(static_cast<std::size_t>(s.tokens * s.top_k), -7)});
    out.tolerance = 1e-3; // The last round may be another one, which moves d by 1e-4 in the mean.
    out.flops = 40.0 * static_cast<double>(s.tokens * s.experts);
    out.bytes = static_cast<double>(s.tokens) *
                (s.experts * static_cast<double>(size_of(type)) + 4.0 * static_cast<double>(s.top_k));
    out.call = [=] { table().sinkhorn(s, d->logits.src(), d->index.data(), nullptr); };
    out.error = [=] {
        const Vec value = balanced(s, d->logits.values());
        double worst = 0.0;
        for (std::int64_t t = 0; t < s.tokens; ++t) {
            const Vec row(value.begin() + t * s.experts, value.begin() + (t + 1) * s.experts);
            Vec sorted = row;
            std::sort(sorted.rbegin(), sorted.rend());
            std::vector<bool> seen(row.size());
            for (std::int64_t k = 0; k < s.top_k; ++k) {
                const std::int32_t e = d->index[static_cast<std::size_t>(t * s.top_k + k)];
                if (e < 0 || e >= s.experts || seen[static_cast<std::size_t>(e)]) return demand(false);
                seen[static_cast<std::size_t>(e)] = true;
                const double best = sorted[static_cast<std::size_t>(k)];
                worst = std::max(worst, std::abs(best - row[static_cast<std::size_t>(e)]) / (best + 1e-30));
            }
        }
        return worst;
    };
    return out;
}

double largest_load(const Index& index, int experts) {
    Vec load(static_cast<std::size_t>(experts), 0.0);
    for (const std::int32_t e : index) ++load[static_cast<std::size_t>(e)];
    return *std::max_element(load.begin(), load.end()) * experts / static_cast<double>(index.size());
}

} // namespace

TEST_CASE("sinkhorn: the best experts behind the iteration over all tokens") {
    for (const Type type : {Type::f32, Type::bf16}) {
        check(sinkhorn_case({1, 4, 2}, type));
        check(sinkhorn_case({3, 5, 5}, type));
        check(sinkhorn_case({64, 8, 2}, type));
        check(sinkhorn_case({301, 33, 1}, type));
    }
    check(sinkhorn_case({1025, 128, 8}, Type::f32));
    check(sinkhorn_case({260, 129, 6}, Type::f32));
    check(sinkhorn_case({130, 256, 8}, Type::f32));
    check(sinkhorn_case({140, 600, 24}, Type::f32));
    check(sinkhorn_case({0, 8, 2}, Type::f32));
}

// Two tokens that both prefer the first expert: the one to which that means less gives way. With a = exp(-1), b =
// exp(-2) the iteration ends where d(1) / d(0) makes both columns equal, at 1 / sqrt(a b) = exp(1.5).
TEST_CASE("sinkhorn: of two tokens that want one expert the other is chosen for the one that minds less") {
    const Tensor logits(Type::f32, Vec{2.0, 1.0, 2.0, 0.0});
    Index index(2, -7);
    table().sinkhorn({2, 2, 1}, logits.src(), index.data(), nullptr);
    CHECK(index == Index{1, 0});
    const Vec value = balanced({2, 2, 1}, logits.values());
    CHECK(std::abs(value[1] / value[0] - std::exp(0.5)) < 1e-2);
}

TEST_CASE("sinkhorn: experts that most tokens prefer are loaded hardly more than the others") {
    const SinkhornShape s{2048, 16, 2};
    Random random("sinkhorn load");
    const Tensor logits(Type::f32, skewed(s, random));
    Index plain(static_cast<std::size_t>(s.tokens * s.top_k)), even(plain);
    RouterShape router;
    router.tokens = s.tokens, router.experts = s.experts, router.top_k = s.top_k;
    Tensor weights(Type::f32, s.tokens * s.top_k);
    table().router(router, logits.src(), {}, {}, plain.data(), weights.f32(), nullptr);
    table().sinkhorn(s, logits.src(), even.data(), nullptr);
    CHECK(largest_load(plain, s.experts) > 3.0);
    CHECK(largest_load(even, s.experts) < 1.3);
}

TEST_CASE("sinkhorn: numbers that are none still choose different experts of the token") {
    Vec logits(6 * 8, 0.5);
    logits[3] = std::nan(""), logits[20] = INFINITY;
    const Tensor with(Type::f32, logits);
    Index index(6 * 3, -7);
    table().sinkhorn({6, 8, 3}, with.src(), index.data(), nullptr);
    for (std::size_t t = 0; t < 6; ++t)
        for (std::size_t k = 0; k < 3; ++k) {
            CHECK(index[t * 3 + k] >= 0);
            CHECK(index[t * 3 + k] < 8);
            for (std::size_t other = 0; other < k; ++other) CHECK(index[t * 3 + k] != index[t * 3 + other]);
        }
}

std::vector<Case> sinkhorn_benchmarks() {
    return {sinkhorn_case({4096, 128, 8}, Type::f32), sinkhorn_case({4096, 256, 8}, Type::f32)};
}

} // namespace moe::test
