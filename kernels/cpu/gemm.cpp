// Matrix products, dense and per expert: Eigen on FP32, with BF16 operands widened block by block.
#include "kernels/cpu/product.hpp"
#include "kernels/cpu/rows.hpp"
#include "kernels/cpu/watched.hpp"

#include <algorithm>
#include <utility>

namespace moe::cpu {
namespace {

// Widened blocks: at least this many products per widened element keep the conversion at a few per cent of the time.
constexpr std::int64_t block_m = 512, block_n = 1024, block_k = 1024;

struct Layout { // stored operand; transposed ones are stored with the contracted index first (A) or last (B)
    Src data;
    std::int64_t ld;
    bool transposed;
};

// A block of a stored operand in FP32.
struct Block {
    const float* data;
    std::int64_t ld;
};

// c[m, n] += op(a)[m, k] op(b)[k, n].
void accumulate(Product p, bool transpose_a, bool transpose_b, Block a, Block b, float* c) {
    p.lda = a.ld, p.ldb = b.ld, p.transpose_a = transpose_a, p.transpose_b = transpose_b;
    watch(a.data, transpose_a ? p.k : p.m, transpose_a ? p.m : p.k, a.ld);
    watch(b.data, transpose_b ? p.n : p.k, transpose_b ? p.k : p.n, b.ld);
    watch(c, p.m, p.n, p.ldc);
    add_product(p, a.data, b.data, c);
}

// The block op(X)[row.., col..] of rows x cols, as stored (transposed or not).
Block block(const Layout& x, std::int64_t row, std::int64_t col, std::int64_t rows, std::int64_t cols, float* buffer) {
    if (x.transposed) {
        std::swap(row, col);
        std::swap(rows, cols);
    }
    const std::int64_t start = row * x.ld + col;
    if (x.data.type == Type::f32) return {f32(x.data, start), x.ld};
    for (std::int64_t r = 0; r < rows; ++r) widen(b16(x.data, start + r * x.ld), buffer + r * cols, cols);
    return {buffer, cols};
}

void clear(float* c, std::int64_t m, std::int64_t n, std::int64_t ld) {
    for (std::int64_t r = 0; r < m; ++r) std::fill_n(c + r * ld, n, 0.0f);
}

// One [m, n] block of C: FP32 in place, BF16 in scratch over the whole contraction so that it is rounded once.
void multiply_block(const GemmShape& s, const Layout& a, const Layout& b, Dst c, std::int64_t ldc, std::int64_t i,
                    std::int64_t j, std::int64_t m, std::int64_t n) {
    const bool direct = c.type == Type::f32;
    float* sum = direct ? f32(c, i * ldc + j) : scratch(Slot::c, m * n);
    const std::int64_t ld = direct ? ldc : n;
    if (!s.accumulate) {
        clear(sum, m, n, ld);
    } else if (!direct) {
        for (std::int64_t r = 0; r < m; ++r) widen(b16(c, (i + r) * ldc + j), sum + r * n, n);
    }
    for (std::int64_t l = 0; l < s.k; l += block_k) {
        const std::int64_t k = std::min(block_k, s.k - l);
        float* wide_a = a.data.type == Type::f32 ? nullptr : scratch(Slot::a, block_m * block_k);
        float* wide_b = b.data.type == Type::f32 ? nullptr : scratch(Slot::b, block_k * block_n);
        accumulate({m, n, k, 0, 0, ld}, a.transposed, b.transposed, block(a, i, l, m, k, wide_a),
                   block(b, l, j, k, n, wide_b), sum);
    }
    if (direct) return;
    for (std::int64_t r = 0; r < m; ++r) narrow(sum + r * n, b16(c, (i + r) * ldc + j), n);
}

void gemm(const GemmShape& s, Src a, Src b, Dst c, void*) {
    for (int i = 0; i < s.batch; ++i) multiply(s, a + i * s.a_step, b + i * s.b_step, c + i * s.c_step);
}

void grouped_gemm(const GroupedShape& s, Src a, Src b, const std::int32_t* counts, Dst c, void*) {
    std::int64_t row = 0;
    for (int e = 0; e < s.groups; ++e) {
        const std::int64_t rows = rows_of(counts, e, row, s.capacity);
        if (rows == 0 && (s.product != GroupedProduct::wgrad || s.accumulate)) continue;
        const std::int64_t weight = e * s.n * s.k;
        GemmShape g;
        switch (s.product) {
        case GroupedProduct::forward:
            g.m = rows, g.n = s.n, g.k = s.k, g.transpose_b = true;
            multiply(g, a + row * s.k, b + weight, c + row * s.n);
            break;
        case GroupedProduct::dgrad:
            g.m = rows, g.n = s.k, g.k = s.n;
            multiply(g, a + row * s.n, b + weight, c + row * s.k);
            break;
        case GroupedProduct::wgrad:
            g.m = s.n, g.n = s.k, g.k = rows, g.transpose_a = true, g.accumulate = s.accumulate;
            multiply(g, a + row * s.n, b + row * s.k, c + weight);
            break;
        }
        row += rows;
    }
}

} // namespace

void multiply(const GemmShape& s, Src a, Src b, Dst c) {
    if (s.m <= 0 || s.n <= 0) return;
    const Layout left{a + s.a_offset, s.lda != 0 ? s.lda : (s.transpose_a ? s.m : s.k), s.transpose_a};
    const Layout right{b + s.b_offset, s.ldb != 0 ? s.ldb : (s.transpose_b ? s.k : s.n), s.transpose_b};
    const std::int64_t ldc = s.ldc != 0 ? s.ldc : s.n;
    c = c + s.c_offset;
    if (a.type == Type::f32 && b.type == Type::f32 && c.type == Type::f32) { // Eigen blocks for the caches itself
        if (!s.accumulate) clear(f32(c, 0), s.m, s.n, ldc);
        if (s.k <= 0) return;
        accumulate({s.m, s.n, s.k, 0, 0, ldc}, s.transpose_a, s.transpose_b, block(left, 0, 0, s.m, s.k, nullptr),
                   block(right, 0, 0, s.k, s.n, nullptr), f32(c, 0));
        return;
    }
    for (std::int64_t j = 0; j < s.n; j += block_n) {
        for (std::int64_t i = 0; i < s.m; i += block_m) {
            multiply_block(s, left, right, c, ldc, i, j, std::min(block_m, s.m - i), std::min(block_n, s.n - j));
        }
    }
}

void add_gemm(Kernels& table) {
    table.gemm = gemm;
    table.grouped_gemm = grouped_gemm;
}

} // namespace moe::cpu
