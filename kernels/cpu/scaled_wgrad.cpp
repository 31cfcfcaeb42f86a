// Gradients of weights from columns of scaled E4M3, or E5M2 by E4M3: widened with their scales and multiplied in FP32.
#include "kernels/cpu/rows.hpp"
#include "kernels/cpu/watched.hpp"
#include "kernels/cpu/widen_e4m3.hpp"

namespace moe::cpu {
namespace {

constexpr std::int64_t together = 256; // columns of either operand that are widened at a time

// `count` columns from `first` on of the `blocks` blocks of x, which has `cols` in each, one behind the other.
void widen_columns(Fp8Columns x, std::int64_t cols, std::int64_t first, std::int64_t count, std::int64_t blocks,
                   bool e5m2, float* y) {
    for (std::int64_t c = 0; c < count; ++c) {
        for (std::int64_t b = 0; b < blocks; ++b, y += scale_block) {
            const std::int64_t column = b * cols + first + c;
            watch(x.data + column * scale_block, 1, scale_block, scale_block);
            watch(y, 1, scale_block, scale_block);
            (e5m2 ? widen_e5m2 : widen_e4m3)(x.data + column * scale_block, x.scale[column], scale_block, y);
        }
    }
}

// One group's gradient, whose first block the operands begin with.
void group_wgrad(const ScaledGradient& s, Fp8Columns a, Fp8Columns b, std::int64_t blocks, Dst c) {
    const std::int64_t depth = blocks * scale_block;
    for (std::int64_t j = 0; j < s.k; j += together) {
        const std::int64_t columns = std::min(together, s.k - j);
        float* right = scratch(Slot::b, together * depth);
        widen_columns(b, s.k, j, columns, blocks, false, right);
        for (std::int64_t i = 0; i < s.n; i += together) {
            GemmShape g;
            g.m = std::min(together, s.n - i), g.n = columns, g.k = depth, g.transpose_b = true, g.ldc = s.k;
            g.accumulate = s.accumulate;
            float* left = scratch(Slot::a, together * depth);
            widen_columns(a, s.n, i, g.m, blocks, s.e5m2, left);
            multiply(g, {left, Type::f32}, {right, Type::f32}, c + (i * s.k + j));
        }
    }
}

void scaled_wgrad(const ScaledGradient& s, Fp8Columns a, Fp8Columns b, const std::int32_t* counts, Dst c, void*) {
    std::int64_t used = 0;
    for (int e = 0; e < s.groups; ++e) {
        const std::int64_t rows = counts == nullptr ? s.capacity : rows_of(counts, e, used, s.capacity);
        const std::int64_t blocks = scale_blocks(rows);
        used += rows;
        if (blocks > 0 || !s.accumulate) group_wgrad(s, a, b, blocks, c + e * s.n * s.k);
        a.data += blocks * s.n * scale_block, a.scale += blocks * s.n;
        b.data += blocks * s.k * scale_block, b.scale += blocks * s.k;
    }
}

} // namespace

void add_scaled_wgrad(Kernels& table) { table.scaled_wgrad = scaled_wgrad; }

} // namespace moe::cpu
