// The values of narrow formats, and what a number becomes by a search through them.
#pragma once

#include "tests/kernels/case.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace moe::test {

// Magnitudes by code. OCP 8-bit Floating Point 1.0 table 1; OCP Microscaling Formats 1.0 table 6.
inline const Vec e2m1_table{0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
inline Vec float_table(int fraction_bits, int bias, int codes) {
    Vec table;
    for (int code = 0; code < codes; ++code) {
        const int exponent = code >> fraction_bits, fraction = code & ((1 << fraction_bits) - 1);
        table.push_back(exponent == 0 ? std::ldexp(fraction, 1 - bias - fraction_bits)
                                      : std::ldexp((1 << fraction_bits) + fraction, exponent - bias - fraction_bits));
    }
    return table;
}
inline const Vec e4m3_table = float_table(3, 7, 0x7f), e5m2_table = float_table(2, 15, 0x7c);

// Searches; of two that are as near it takes the one of the even code. Beyond the table its end is nearest, which
// differences in double would not tell.
inline double nearest_of(const Vec& table, double x) {
    const double magnitude = std::min(std::abs(x), table.back());
    std::size_t best = 0;
    for (std::size_t code = 1; code < table.size(); ++code) {
        const double off = std::abs(magnitude - table[code]), least = std::abs(magnitude - table[best]);
        if (off < least || (off == least && code % 2 == 0)) best = code;
    }
    return std::copysign(table[best], x);
}
inline double stochastic_of(double x, std::uint64_t n) {
    const double magnitude = std::min(std::abs(x), 6.0);
    std::size_t upper = 1;
    while (e2m1_table[upper] < magnitude) ++upper;
    const double gap = e2m1_table[upper] - e2m1_table[upper - 1];
    const bool up = (magnitude - e2m1_table[upper - 1]) / gap * 65536.0 > static_cast<double>(n);
    return std::copysign(e2m1_table[up ? upper : upper - 1], x);
}

inline double largest_in(const Vec& values) {
    double largest = 0.0;
    for (const double x : values) largest = std::max(largest, std::abs(x));
    return largest;
}
// The smallest power of two that brings a magnitude to `most`.
inline double power_for(double largest, double most) {
    double scale = std::ldexp(1.0, -126);
    while (largest / scale > most) scale *= 2.0;
    return scale;
}
// FP32's product, as the rule has it.
inline double sixth_of(double x) { return static_cast<double>(static_cast<float>(x) * (1.0f / 6.0f)); }

} // namespace moe::test
