// Operands of products as tensor cores that scale blocks read them: packed codes with the contracted index last, and
// scales in tiles of 128 rows x 4 blocks.
//
// What is packed are values that RoundFormat::mxfp8 or nvfp4 has already rounded to, in whole blocks of the contracted
// index. Codes times scales are these values to the bit. Scales may be others than those they were rounded with:
//   mxfp8  E4M3 and, for every 32, the power of two fp8_scale() of their largest as UE8M0. It is at most the scale of
//          before, so every value stays on E4M3's grid.
//   nvfp4  E2M1, two in a byte, the first in the low half, and for every 16 a scale UE4M3; one power of two t for all.
//          A block's scale is its largest over 6, 4, 3, 2, 1.5, 1 or 0.5, the first that stands for all values. t is
//          the smallest power of two that brings the least scale of every block to 448. It is at most the one they
//          were rounded with, so every scale stays on UE4M3's grid.
// A block that is none of the format's becomes NaN; nvfp4's with nothing above 2^-100, where BF16 has lost bits, zeros.
// Layout: cuBLAS 13 documentation, "1D Block Scaling Factors Layout".
#pragma once

#include "kernels/bf16.hpp"
#include "kernels/kernel_args.hpp"
#include "kernels/rounding.hpp"

#include <algorithm>
#include <array>

namespace moe {

inline constexpr std::int64_t packed_together = 32; // contracted elements: k is a multiple
inline constexpr std::int64_t scale_tile_rows = 128, scale_tile_blocks = 4;

// rows x k values in BF16, stored [rows, k], or [k, rows] where the contracted index comes first.
struct BlockShape {
    RoundFormat format = RoundFormat::mxfp8;
    std::int64_t rows = 0, k = 0;
    std::int64_t stride = 0; // elements from one row to the next, or from one k to the next
    bool contracted_first = false;

    bool fp4() const { return format == RoundFormat::nvfp4; }
    std::int64_t blocks() const { return k / (fp4() ? nvfp4_values : mxfp8_values); } // of a row
    std::int64_t tiles_across() const { return (blocks() + scale_tile_blocks - 1) / scale_tile_blocks; }
    std::int64_t code_bytes() const { return fp4() ? rows * k / 2 : rows * k; }
    std::int64_t scale_bytes() const { // of whole tiles; what lies beyond rows and blocks is 0
        return (rows + scale_tile_rows - 1) / scale_tile_rows * tiles_across() * scale_tile_rows * scale_tile_blocks;
    }
};

// Where the scale of a block lies.
inline std::int64_t scale_place(const BlockShape& s, std::int64_t row, std::int64_t block) {
    const std::int64_t tile = row / scale_tile_rows * s.tiles_across() + block / scale_tile_blocks;
    return tile * scale_tile_rows * scale_tile_blocks + row % 32 * 16 + row % scale_tile_rows / 32 * 4 +
           block % scale_tile_blocks;
}

inline constexpr std::array<float, 7> e2m1_divisors{6.0f, 4.0f, 3.0f, 2.0f, 1.5f, 1.0f, 0.5f};

// The scale of 4 bits that brings `largest` to e2m1_divisors[i]; 0 where none does exactly.
inline float e2m1_block_scale(float largest, std::size_t i) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(largest / e2m1_divisors[i]);
    const float scale = std::bit_cast<float>((bits + 0x80000u) & ~0xfffffu);
    return scale * e2m1_divisors[i] == largest ? scale : 0.0f;
}
// Code of a magnitude that is one of E2M1's times `scale`; 8 where it is none.
inline unsigned e2m1_code(float magnitude, float scale) {
    for (unsigned code = 0; code < 8; ++code)
        if (e2m1_values.of[code] * scale == magnitude) return code;
    return 8;
}
using Fp4Block = std::array<float, nvfp4_values>;
inline bool stands_for(float scale, const Fp4Block& v) {
    return scale > 0.0f && std::all_of(v.begin(), v.end(), [&](float x) { return e2m1_code(std::abs(x), scale) < 8; });
}
inline float largest_of_block(const Fp4Block& v) {
    float largest = 0.0f;
    for (const float x : v) largest = std::abs(x) > largest || x != x ? std::abs(x) : largest;
    return largest;
}
// The least t that a block asks for; 0: none.
inline float least_tensor_scale(const Fp4Block& v) {
    const float largest = largest_of_block(v);
    for (std::size_t i = 0; i < e2m1_divisors.size() && largest > 0.0f; ++i)
        if (const float scale = e2m1_block_scale(largest, i); stands_for(scale, v)) return fp8_scale(scale);
    return 0.0f;
}

// The CPU's packing: codes[code_bytes()], scales[scale_bytes()]. Returns t; 1 for mxfp8.
inline float pack_blocks(const BlockShape& s, const std::uint16_t* x, std::uint8_t* codes, std::uint8_t* scales) {
    const auto at = [&](std::int64_t row, std::int64_t k) {
        return float_of_bf16(x[s.contracted_first ? k * s.stride + row : row * s.stride + k]);
    };
    std::fill_n(scales, s.scale_bytes(), std::uint8_t{0});
    const std::int64_t values = s.k / std::max<std::int64_t>(s.blocks(), 1);
    const auto each_block = [&](auto visit) {
        for (std::int64_t row = 0; row < s.rows; ++row)
            for (std::int64_t block = 0; block < s.blocks(); ++block) visit(row, block, block * values);
    };
    if (!s.fp4()) {
        each_block([&](std::int64_t row, std::int64_t block, std::int64_t first) {
            float largest = 0.0f;
            for (std::int64_t k = first; k < first + values; ++k)
                if (const float m = std::abs(at(row, k)); m > largest || m != m) largest = m;
            const float scale = fp8_scale(largest);
            bool exact = true;
            for (std::int64_t k = first; k < first + values; ++k) {
                const std::uint8_t code = e4m3_of_float(at(row, k) / scale);
                codes[row * s.k + k] = code;
                exact = exact && float_of_e4m3(code) * scale == at(row, k);
            }
            scales[scale_place(s, row, block)] =
                exact ? static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(scale) >> 23) : std::uint8_t{0xff};
        });
        return 1.0f;
    }
    const auto block_at = [&](std::int64_t row, std::int64_t first) {
        Fp4Block v;
        for (std::size_t i = 0; i < v.size(); ++i) v[i] = at(row, first + static_cast<std::int64_t>(i));
        return v;
    };
    float t = 0x1p-126f;
    each_block([&](std::int64_t row, std::int64_t, std::int64_t first) {
        t = std::max(t, least_tensor_scale(block_at(row, first)));
    });
    each_block([&](std::int64_t row, std::int64_t block, std::int64_t first) {
        const Fp4Block v = block_at(row, first);
        const float largest = largest_of_block(v);
        std::uint8_t byte = largest < 0x1p-100f ? 0 : 0x7f;
        float scale = 0.0f;
        for (std::size_t i = 0; i < e2m1_divisors.size() && scale == 0.0f && largest > 0.0f; ++i) {
            const float asked = e2m1_block_scale(largest, i);
            const std::uint8_t code = e4m3_of_float(asked / t);
            if (float_of_e4m3(code) * t == asked && stands_for(asked, v)) scale = asked, byte = code;
        }
        for (std::size_t i = 0; i < v.size(); i += 2) {
            unsigned pair = 0;
            for (std::size_t j = 0; j < 2 && scale > 0.0f; ++j)
                pair |= (e2m1_code(std::abs(v[i + j]), scale) | (std::signbit(v[i + j]) ? 8u : 0u)) << 4 * j;
            codes[(row * s.k + first) / 2 + static_cast<std::int64_t>(i / 2)] = static_cast<std::uint8_t>(pair);
        }
        scales[scale_place(s, row, block)] = byte;
    });
    return t;
}

// What codes and scales stand for: element k of a row.
inline float unpacked(const BlockShape& s, const std::uint8_t* codes, const std::uint8_t* scales, float t,
                      std::int64_t row, std::int64_t k) {
    const std::uint8_t scale = scales[scale_place(s, row, k / (s.fp4() ? nvfp4_values : mxfp8_values))];
    if (!s.fp4()) {
        const float power = scale == 0xff ? std::numeric_limits<float>::quiet_NaN()
                                          : std::bit_cast<float>(static_cast<std::uint32_t>(scale) << 23);
        return float_of_e4m3(codes[row * s.k + k]) * power;
    }
    const unsigned code = codes[(row * s.k + k) / 2] >> 4 * (k % 2) & 15u;
    return std::copysign(e2m1_values.of[code & 7u], (code & 8u) != 0 ? -1.0f : 1.0f) * float_of_e4m3(scale) * t;
}

} // namespace moe
