// Matrix products, dense and per expert: Eigen on FP32, with BF16 operands widened block by block.
#include "kernels/cpu/rows.hpp"
#include "kernels/cpu/small_gemm.hpp"

#include <Eigen/Core>

namespace moe::cpu {
namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using In = Eigen::Map<const Matrix, 0, Eigen::OuterStride<>>;
using Out = Eigen::Map<Matrix, 0, Eigen::OuterStride<>>;

// Widened blocks: at least this many products per widened element keep the conversion at a few per cent of the time.
constexpr std::int64_t block_m = 512, block_n = 1024, block_k = 1024;

struct Layout { // stored operand; transposed ones are stored with the contracted index first (A) or last (B)
    Src data;
    std::int64_t ld;
    bool transposed;
};

// C += op(A) op(B), all FP32.
void accumulate(In a, bool ta, In b, bool tb, Out c) {
    if (!ta && !tb) {
        const SmallGemm small{c.rows(), c.cols(), a.cols(), a.outerStride(), b.outerStride(), c.outerStride()};
        if (small.worthwhile()) return multiply_small(small, a.data(), b.data(), c.data());
        c.noalias() += a * b;
    } else if (!ta) {
        c.noalias() += a * b.transpose();
    } else if (!tb) {
        c.noalias() += a.transpose() * b;
    } else {
        c.noalias() += a.transpose() * b.transpose();
    }
}

// The block op(X)[row.., col..] of rows x cols, as stored (transposed or not), in FP32.
In block(const Layout& x, std::int64_t row, std::int64_t col, std::int64_t rows, std::int64_t cols, float* buffer) {
    if (x.transposed) {
        std::swap(row, col);
        std::swap(rows, cols);
    }
    const std::int64_t start = row * x.ld + col;
    if (x.data.type == Type::f32) return In(f32(x.data, start), rows, cols, Eigen::OuterStride<>(x.ld));
    for (std::int64_t r = 0; r < rows; ++r) widen(b16(x.data, start + r * x.ld), buffer + r * cols, cols);
    return In(buffer, rows, cols, Eigen::OuterStride<>(cols));
}

void clear(Out c) { c.setZero(); }

// One [m, n] block of C: FP32 in place, BF16 in scratch over the whole contraction so that it is rounded once.
void multiply_block(const GemmShape& s, const Layout& a, const Layout& b, Dst c, std::int64_t ldc, std::int64_t i,
                    std::int64_t j, std::int64_t m, std::int64_t n) {
    const bool direct = c.type == Type::f32;
    float* sum = direct ? f32(c, i * ldc + j) : scratch(Slot::c, m * n);
    Out out(sum, m, n, Eigen::OuterStride<>(direct ? ldc : n));
    if (!s.accumulate) {
        clear(out);
    } else if (!direct) {
        for (std::int64_t r = 0; r < m; ++r) widen(b16(c, (i + r) * ldc + j), sum + r * n, n);
    }
    for (std::int64_t l = 0; l < s.k; l += block_k) {
        const std::int64_t k = std::min(block_k, s.k - l);
        float* wide_a = a.data.type == Type::f32 ? nullptr : scratch(Slot::a, block_m * block_k);
        float* wide_b = b.data.type == Type::f32 ? nullptr : scratch(Slot::b, block_k * block_n);
        accumulate(block(a, i, l, m, k, wide_a), a.transposed, block(b, l, j, k, n, wide_b), b.transposed, out);
    }
    if (direct) return;
    for (std::int64_t r = 0; r < m; ++r) narrow(sum + r * n, b16(c, (i + r) * ldc + j), n);
}

void gemm(const GemmShape& shape, Src a, Src b, Dst c, void*) { multiply(shape, a, b, c); }

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
        Out out(f32(c, 0), s.m, s.n, Eigen::OuterStride<>(ldc));
        if (!s.accumulate) clear(out);
        if (s.k <= 0) return;
        accumulate(block(left, 0, 0, s.m, s.k, nullptr), s.transpose_a, block(right, 0, 0, s.k, s.n, nullptr),
                   s.transpose_b, out);
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
