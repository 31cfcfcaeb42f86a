// Grouped products of scaled E4M3 operands, or E5M2 by E4M3: widened with their scales and multiplied in FP32.
#include "kernels/cpu/rows.hpp"
#include "kernels/cpu/watched.hpp"
#include "kernels/cpu/widen_e4m3.hpp"

#include <algorithm>

namespace moe::cpu {
namespace {

constexpr std::int64_t block = 256; // rows of either operand that are widened at a time

// Row by row, scale[k / scale_block] each.
void widen_scaled(const std::uint8_t* x, const float* scale, std::int64_t k, bool e5m2, float* y) {
    watch(x, 1, k, k);
    watch(y, 1, k, k);
    for (std::int64_t i = 0; i < k; i += scale_block)
        (e5m2 ? widen_e5m2 : widen_e4m3)(x + i, scale[i / scale_block], std::min<std::int64_t>(scale_block, k - i),
                                         y + i);
}

void scaled_gemm(const ScaledShape& s, const std::uint8_t* a, const float* a_scale, const std::uint8_t* b,
                 const float* b_scale, const std::int32_t* counts, Dst c, void*) {
    const std::int64_t blocks = (s.k + scale_block - 1) / scale_block, b_rows = (s.n + scale_block - 1) / scale_block;
    std::int64_t first = 0;
    for (int e = 0; e < s.groups; ++e) {
        const std::int64_t rows = counts == nullptr ? s.capacity : rows_of(counts, e, first, s.capacity);
        for (std::int64_t j = 0; rows > 0 && j < s.n; j += block) {
            const std::int64_t n = std::min(block, s.n - j);
            float* right = scratch(Slot::b, block * s.k);
            for (std::int64_t l = 0; l < n; ++l) {
                const float* scale = b_scale + (e * b_rows + (j + l) / scale_block) * blocks;
                widen_scaled(b + (e * s.n + j + l) * s.k, scale, s.k, false, right + l * s.k);
            }
            for (std::int64_t i = first; i < first + rows; i += block) {
                GemmShape g;
                g.m = std::min(block, first + rows - i), g.n = n, g.k = s.k, g.transpose_b = true, g.ldc = s.n;
                float* left = scratch(Slot::a, block * s.k);
                for (std::int64_t l = 0; l < g.m; ++l) {
                    widen_scaled(a + (i + l) * s.k, a_scale + (i + l) * blocks, s.k, s.e5m2, left + l * s.k);
                }
                multiply(g, {left, Type::f32}, {right, Type::f32}, c + (i * s.n + j));
            }
        }
        first += rows;
    }
}

} // namespace

void add_scaled_gemm(Kernels& table) { table.scaled_gemm = scaled_gemm; }

} // namespace moe::cpu
