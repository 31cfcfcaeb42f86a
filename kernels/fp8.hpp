// E4M3 and E5M2 as storage: the FP8 formats of 4 and of 5 exponent bits (arXiv:2209.05433; OCP 8-bit Floating
// Point 1.0).
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

namespace moe {

// Bias 7, no infinities, one NaN of each sign, +-448 at most; exponent 0 is subnormal.
inline float float_of_e4m3(std::uint8_t x) {
    const int exponent = x >> 3 & 15, fraction = x & 7;
    const float magnitude = exponent == 15 && fraction == 7 ? std::numeric_limits<float>::quiet_NaN()
                            : exponent == 0                 ? static_cast<float>(fraction) / 512.0f
                                                            : static_cast<float>((8 + fraction) << exponent) / 1024.0f;
    return (x & 0x80) != 0 ? -magnitude : magnitude;
}

// Rounds to the nearest, ties to even; beyond +-448 that, NaN stays NaN.
inline std::uint8_t e4m3_of_float(float x) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x), sign = bits >> 24 & 0x80;
    const float magnitude = std::bit_cast<float>(bits & 0x7fffffffu);
    std::uint32_t rounded;
    if (!(magnitude < 448.0f)) {
        rounded = magnitude >= 448.0f ? 0x7e : 0x7f;
    } else if (magnitude < 0x1p-6f) { // The last place of 2^14 is that of subnormal values, 2^-9.
        rounded = std::bit_cast<std::uint32_t>(magnitude + 0x1p14f) - std::bit_cast<std::uint32_t>(0x1p14f);
    } else {
        const std::uint32_t m = bits & 0x7fffffffu;
        rounded = ((m + 0x7ffffu + (m >> 20 & 1)) >> 20) - ((127 - 7) << 3);
    }
    return static_cast<std::uint8_t>(rounded | sign);
}

// E5M2 is the upper byte of IEEE's half: bias 15, 2 fraction bits, infinities and NaNs of both signs.
inline float float_of_e5m2(std::uint8_t x) {
    const int exponent = x >> 2 & 31, fraction = x & 3;
    const float unit = std::bit_cast<float>(static_cast<std::uint32_t>(127 - 17 + (exponent > 0 ? exponent : 1)) << 23);
    const float magnitude = exponent < 31   ? static_cast<float>(fraction + (exponent > 0 ? 4 : 0)) * unit
                            : fraction == 0 ? std::numeric_limits<float>::infinity()
                                            : std::numeric_limits<float>::quiet_NaN();
    return (x & 0x80) != 0 ? -magnitude : magnitude;
}

// Rounds to the nearest, ties to even; beyond +-57344 that, infinity too, NaN stays NaN.
inline std::uint8_t e5m2_of_float(float x) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x), sign = bits >> 24 & 0x80, m = bits & 0x7fffffffu;
    const float magnitude = std::bit_cast<float>(m);
    std::uint32_t rounded;
    if (!(magnitude < 57344.0f)) {
        rounded = magnitude >= 57344.0f ? 0x7b : 0x7f;
    } else if (magnitude < 0x1p-14f) { // The last place of 2^7 is that of subnormal values, 2^-16.
        rounded = std::bit_cast<std::uint32_t>(magnitude + 0x1p7f) - std::bit_cast<std::uint32_t>(0x1p7f);
    } else {
        rounded = ((m + 0xfffffu + (m >> 21 & 1)) >> 21) - ((127 - 15) << 2);
    }
    return static_cast<std::uint8_t>(rounded | sign);
}

// The scale of a block whose largest magnitude is this: the smallest power of two that brings it to 448 or below, so
// that what a scaled value stands for is exact in BF16. 2^-126 for blocks of zeros and of the smallest numbers; NaN
// where a value is infinite or NaN, so that it shows in all that the block takes part in.
inline float fp8_scale(float largest) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(largest);
    if (!(largest < std::numeric_limits<float>::infinity())) return std::numeric_limits<float>::quiet_NaN();
    const std::uint32_t above = (bits & 0x7fffffu) > 0x600000u ? 1 : 0; // 448 = 1.75 * 2^8
    const std::uint32_t exponent = (bits >> 23) + above;
    return std::bit_cast<float>((exponent < 9 ? 1u : exponent - 8) << 23);
}

} // namespace moe
