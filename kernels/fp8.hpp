// E4M3 as storage: the FP8 format of 4 exponent and 3 fraction bits (arXiv:2209.05433; OCP 8-bit Floating Point 1.0).
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
