// Counts with their nouns.
#include "planner/base/counted.hpp"

#include <doctest/doctest.h>

#include <limits>

using namespace moe;

TEST_CASE("counted: one is singular, all else is plural, and thousands have commas") {
    CHECK(counted(1, "rank") == "1 rank");
    CHECK(counted(0, "rank") == "0 ranks");
    CHECK(counted(-1, "step") == "-1 steps");
    CHECK(counted(2, "process") == "2 processes");
    CHECK(counted(999, "copy") == "999 copies");
    CHECK(counted(1000, "key") == "1,000 keys");
    CHECK(counted(1234567, "micro-batch") == "1,234,567 micro-batches");
    CHECK(counted(std::size_t{128}, "GPU") == "128 GPUs");
    CHECK(counted(-123456) == "-123,456");
    CHECK(counted(-123) == "-123");
    CHECK(counted(std::numeric_limits<std::int64_t>::min()) == "-9,223,372,036,854,775,808");
}
