// E4M3 as storage: the FP8 format of 4 exponent and 3 fraction bits (arXiv:2209.05433; OCP 8-bit Floating Point 1.0).
#pragma once

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

} // namespace moe
