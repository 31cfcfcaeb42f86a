// BF16 as storage: the upper half of an FP32, rounded to nearest even; arithmetic is always FP32.
#pragma once

#include <bit>
#include <cstdint>

namespace moe {

inline float float_of_bf16(std::uint16_t bits) { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }

// NaN stays NaN: rounding a NaN's payload up could otherwise carry into the exponent and sign.
inline std::uint16_t bf16_of_float(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const std::uint32_t quiet = (bits >> 16) | 0x40u;
    return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

} // namespace moe
