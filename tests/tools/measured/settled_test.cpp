// Warm-up and outliers of made-up step times, and the median of what is left.
#include "tests/support/nearly.hpp"
#include "tools/measured/settled.hpp"

#include <doctest/doctest.h>

using moe::tools::settle;
using moe::tools::Settled;
using Indices = std::vector<std::size_t>;

TEST_CASE("settled: the slow start and an evaluation are left out, the rest is the run") {
    const Settled s = settle({40.0, 6.0, 2.3, 2.0, 2.02, 1.99, 2.01, 5.0, 2.0, 2.01});
    CHECK(s.warm_up == 3);
    CHECK(s.outliers == Indices{7});
    CHECK(s.used == Indices{3, 4, 5, 6, 8, 9});
    CHECK(s.median == nearly(2.005));
    CHECK(s.low == nearly(1.995));
    CHECK(s.high == nearly(2.015));
}

TEST_CASE("settled: a run that is even has only its first iteration left out") {
    const Settled s = settle(std::vector<double>(50, 3.0));
    CHECK(s.warm_up == 1);
    CHECK(s.outliers.empty());
    CHECK(s.used.size() == 49);
    CHECK(s.median == 3.0);
    CHECK(s.low == s.high);
}

TEST_CASE("settled: few iterations, and a step that is fast since it was skipped") {
    CHECK(settle({7.0}).used == Indices{0});
    CHECK(settle({7.0}).median == 7.0);
    CHECK(settle({9.0, 2.0}).used == Indices{1});
    CHECK(settle({9.0, 2.0, 2.2}).warm_up == 1);
    CHECK(settle({2.0, 2.0, 2.0, 2.0, 0.3, 2.0, 2.0}).outliers == Indices{4});
}

TEST_CASE("settled: times that scatter as a whole are all used, and the spread says so") {
    const Settled s = settle({2.0, 3.0, 2.0, 3.0, 2.1, 2.9, 2.0, 3.0, 2.1, 2.9});
    CHECK(s.outliers.empty());
    CHECK(s.high - s.low > 0.8);
    // Warm-up ends within the first half, however slow the run becomes later.
    CHECK(settle({1.0, 1.0, 1.0, 1.0, 9.0, 9.0, 9.0, 9.0}).warm_up == 4);
}
