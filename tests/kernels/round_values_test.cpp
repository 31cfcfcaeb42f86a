// Rounding of one number to E2M1, E4M3 and E5M2 against the formats' tables.
#include "kernels/rounding.hpp"
#include "tests/kernels/round_values.hpp"

#include <doctest/doctest.h>

namespace moe::test {

TEST_CASE("round: values of E2M1, E4M3 and E5M2 are those of their tables, and what lies between goes to the nearest") {
    CHECK(e4m3_table.back() == 448.0);
    CHECK(e4m3_table[1] == 0.001953125);
    CHECK(e5m2_table.back() == 57344.0);
    CHECK(e5m2_table[1] == 0x1p-16);
    for (std::size_t code = 0; code + 1 < e5m2_table.size(); ++code) {
        const double low = e5m2_table[code], high = e5m2_table[code + 1];
        for (const double x : {low, 0.75 * low + 0.25 * high, 0.5 * (low + high), 0.25 * low + 0.75 * high})
            CHECK(static_cast<double>(rounded_to_e5m2(static_cast<float>(-x))) == -nearest_of(e5m2_table, x));
    }
    CHECK(rounded_to_e5m2(1e9f) == 57344.0f);
    for (const float scale : {1.0f, 0.4375f, 26.0f * 0x1p-9f}) {
        for (int i = 0; i <= 6400; ++i) {
            const double x = i / 1000.0;
            CHECK(static_cast<double>(rounded_to_e2m1(static_cast<float>(x) * scale, scale)) ==
                  nearest_of(e2m1_table,
                             static_cast<double>(static_cast<float>(x) * scale) / static_cast<double>(scale)) *
                      static_cast<double>(scale));
        }
    }
}

} // namespace moe::test
