// Values that narrow formats represent, with their scales: the rules by which operands of products are rounded.
//
// Every scale is a power of two, or E4M3 times a power of two, so that BF16 holds each result as it is.
//   e4m3, e5m2  x / s rounded to nearest, s the smallest power of two that brings the tensor's largest to 448 or 57344
//   mxfp8       the same in E4M3 for every 32 values (OCP Microscaling Formats 1.0; TransformerEngine rounds E8M0 up)
//   nvfp4       E2M1 for every 16 values with the scale s = t E4M3(largest / 6 / t), t the power of two that brings the
//               tensor's largest / 6 to 448 or below (arXiv 2509.25149 appendix B, where t is FP32)
// TransformerEngine divides by FP32 scales of tensors. Powers of two use up to half of the range less. Where the
// largest is one of steps before (RoundShape::window), values beyond the range become its end; TransformerEngine's,
// too.
#pragma once

#include "kernels/deviate.hpp"
#include "kernels/fp8.hpp"

#include <bit>
#include <cmath>
#include <cstdint>

namespace moe {

inline constexpr int mxfp8_values = 32, nvfp4_values = 16; // that share a scale

// Smallest power of two that brings a magnitude to 57344 = 1.75 * 2^15; fp8_scale() is for 448 = 1.75 * 2^8.
inline float e5m2_scale(float largest) {
    const float for_e4m3 = fp8_scale(largest);
    return for_e4m3 > 0x1p-119f ? for_e4m3 * 0x1p-7f : for_e4m3 == for_e4m3 ? 0x1p-126f : for_e4m3;
}

// The nearest value of a format with so many bits of fraction whose least normal number is 2^least, ties to even;
// beyond
// +-most that, NaN stays NaN. Without branches, so that loops over it are vectors.
template <int fraction_bits, int least>
float rounded_to(float x, float most) {
    constexpr int dropped = 23 - fraction_bits;
    constexpr std::uint32_t below = (1u << dropped) - 1;
    // The last place of `unit` is that of subnormal values.
    constexpr float unit = std::bit_cast<float>(static_cast<std::uint32_t>(127 + least - fraction_bits + 23) << 23);
    constexpr float normal = std::bit_cast<float>(static_cast<std::uint32_t>(127 + least) << 23);
    const std::uint32_t m = std::bit_cast<std::uint32_t>(x) & 0x7fffffffu;
    const float magnitude = std::bit_cast<float>(m);
    const float large = std::bit_cast<float>((m + (below >> 1) + (m >> dropped & 1)) & ~below);
    float y = magnitude < normal ? (magnitude + unit) - unit : large;
    y = y > most ? most : y;
    y = magnitude == magnitude ? y : magnitude;
    return std::copysign(y, x);
}
inline float rounded_to_e4m3(float x) { return rounded_to<3, -6>(x, 448.0f); }
inline float rounded_to_e5m2(float x) { return rounded_to<2, -14>(x, 57344.0f); }

// Magnitudes of E2M1, and the bounds between which the next one is nearer; a tie goes to the even code.
struct E2m1Table {
    float of[8];
};
inline constexpr E2m1Table e2m1_values{{0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f}};
inline constexpr E2m1Table e2m1_bounds{{0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f}};

inline constexpr float sixth = 1.0f / 6.0f; // of the largest magnitude: 6 is E2M1's
inline float nvfp4_tensor_scale(float largest) { return fp8_scale(largest * sixth); }
// Of a block; `tensor` is nvfp4_tensor_scale().
inline float nvfp4_scale(float largest, float tensor) {
    return float_of_e4m3(e4m3_of_float(largest * sixth * (1.0f / tensor))) * tensor;
}

// The nearest value of E2M1 times `scale`, 6 at most. Bounds times scales have 8 bits: every comparison is exact.
inline float rounded_to_e2m1(float x, float scale) {
    const float magnitude = std::abs(x);
    float y = 0.0f;
    for (int i = 0; i < 7; ++i) {
        const float bound = e2m1_bounds.of[i] * scale;
        const bool above = i % 2 == 0 ? magnitude > bound : magnitude >= bound;
        y += above ? e2m1_values.of[i + 1] - e2m1_values.of[i] : 0.0f;
    }
    return std::copysign(y * scale, x);
}

// One of the two values around x: the upper one where its share of the gap exceeds n / 2^16, n < 2^16 random. Neither
// difference nor product is rounded.
inline float stochastic_e2m1(float x, float scale, std::uint32_t n) {
    const float magnitude = std::abs(x);
    int code = 0;
    for (int i = 1; i < 8; ++i) code += magnitude >= e2m1_values.of[i] * scale;
    if (code < 7) {
        const float lower = e2m1_values.of[code] * scale,
                    gap = (e2m1_values.of[code + 1] - e2m1_values.of[code]) * scale;
        code += (magnitude - lower) * 0x1p16f > static_cast<float>(n) * gap;
    }
    return std::copysign(e2m1_values.of[code] * scale, x);
}

// Hadamard transform of 16 values with random signs, orthonormal: y = H diag(signs) x / 4. Signs are one vector for a
// whole training (arXiv 2509.25149 section 4.2): bit i is that of value i.
inline constexpr std::uint32_t hadamard_signs = static_cast<std::uint32_t>(splitmix(0) & 0xffffu);
inline void hadamard(float (&x)[16]) {
    for (int i = 0; i < 16; ++i)
        if ((hadamard_signs >> i & 1) != 0) x[i] = -x[i];
    for (int half = 1; half < 16; half *= 2)
        for (int i = 0; i < 16; ++i) {
            if ((i & half) != 0) continue;
            const float sum = x[i] + x[i + half], difference = x[i] - x[i + half];
            x[i] = sum, x[i + half] = difference;
        }
    for (float& value : x) value *= 0.25f;
}

// Random bits of stochastic rounding. The tensor's key is
//   key = splitmix(noise ^ splitmix(tensor)), tensor + 1 for what is rounded in columns,
// a row of position p in sequence s has
//   row = splitmix(key ^ splitmix(2^32 s + p))
// and row i of group e that of the first row with splitmix(row ^ splitmix(2^32 e + i)). Column c takes the 16 bits of
// the noise in kernels/deviate.hpp.

} // namespace moe
