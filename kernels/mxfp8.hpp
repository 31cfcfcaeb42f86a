// MXFP8 as storage: blocks of 32 values in E4M3 that share a power of two (OCP Microscaling Formats 1.0), which is the
// smallest that keeps them all in range.
#pragma once

#include "kernels/fp8.hpp"

#include <bit>
#include <cmath>
#include <cstdint>

namespace moe {

inline constexpr std::int64_t mxfp8_block = 32;

// E8M0: the exponent bits of a power of two as FP32 has them; 255 is NaN.
inline float float_of_e8m0(std::uint8_t x) {
    return x == 255 ? std::numeric_limits<float>::quiet_NaN()
                    : std::bit_cast<float>(static_cast<std::uint32_t>(x) << 23);
}
inline std::uint8_t e8m0_of_float(float scale) {
    return static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(scale) >> 23 & 255);
}

// n values, of whole blocks, and back. What decode_mxfp8() gives is kept as it is when it is encoded again, with all of
// its block or a part: what is representable under a scale is so under any smaller one that it fits.
inline void encode_mxfp8(const float* x, std::int64_t n, std::uint8_t* code, std::uint8_t* scale) {
    for (std::int64_t first = 0; first < n; first += mxfp8_block) {
        float largest = 0.0f;
        bool number = true;
        for (std::int64_t i = first; i < first + mxfp8_block; ++i) {
            const float magnitude = std::abs(x[i]);
            number = number && magnitude < std::numeric_limits<float>::infinity();
            largest = magnitude > largest ? magnitude : largest;
        }
        const float unit = fp8_scale(number ? largest : std::numeric_limits<float>::quiet_NaN());
        scale[first / mxfp8_block] = e8m0_of_float(unit);
        for (std::int64_t i = first; i < first + mxfp8_block; ++i) code[i] = e4m3_of_float(x[i] / unit);
    }
}
inline void decode_mxfp8(const std::uint8_t* code, const std::uint8_t* scale, std::int64_t n, float* x) {
    for (std::int64_t i = 0; i < n; ++i) x[i] = float_of_e4m3(code[i]) * float_of_e8m0(scale[i / mxfp8_block]);
}

} // namespace moe
