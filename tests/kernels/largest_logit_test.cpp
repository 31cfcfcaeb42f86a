// The largest logit of each head that attention tells, against the scores in double.
#include "tests/kernels/attention_data.hpp"
#include "tests/kernels/case.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

namespace moe::test {
namespace {

constexpr double minus_infinity = -std::numeric_limits<double>::infinity();

Vec largest_of(const AttentionData& d) {
    Vec most(static_cast<std::size_t>(d.s.heads), minus_infinity);
    d.for_each_query(d.q.values(), d.k.values(),
                     [&](std::int64_t h, std::int64_t, std::int64_t, const Vec& scores, const auto&) {
                         for (const double x : scores)
                             most[static_cast<std::size_t>(h)] = std::max(most[static_cast<std::size_t>(h)], x);
                     });
    return most;
}

} // namespace

TEST_CASE("attention: the largest logit of each head is one that its queries see") {
    for (const Type type : {Type::f32, Type::bf16})
        for (const AttentionShape& s :
             {shape(1, 1, 1, 4, 4, 2, 2), shape(1, 70, 70, 2, 2, 72, 40), shape(2, 5, 5, 4, 2, 3, 3),
              shape(1, 7, 7, 4, 1, 3, 5, false), shape(2, 300, 300, 4, 2, 8, 8),
              shape(2, 290, 290, 4, 2, 4, 4, true, 3), shape(1, 130, 300, 2, 1, 4, 3)})
            for (const Options o : {Options{false, false, type, 0}, {false, true, type, 5}, {true, false, type, 0}}) {
                if (o.packed && s.seq_q != s.seq_k) continue;
                if (o.documents > 0 && !s.causal) continue;
                auto d = attention_data("largest logit", s, o);
                const Vec want = largest_of(*d);
                Tensor told(Type::f32, Vec(want.size(), minus_infinity));
                d->s.largest = told.f32();
                d->run();
                for (std::size_t h = 0; h < want.size(); ++h)
                    CHECK(std::abs(told.at(static_cast<std::int64_t>(h)) - want[h]) <=
                          1e-5 * (1.0 + std::abs(want[h])));
                // The same call again changes nothing, and a larger one stays.
                told.set(0, told.at(0) + 1.0);
                const Vec before = told.values();
                d->run();
                CHECK(told.values() == before);
            }
}

TEST_CASE("attention: queries that see no key have no largest logit") {
    auto d = attention_data("no largest logit", shape(1, 2, 0, 1, 1, 2, 2), {});
    Tensor told(Type::f32, Vec{minus_infinity});
    d->s.largest = told.f32();
    d->run();
    CHECK(std::isinf(told.at(0)));
}

} // namespace moe::test
