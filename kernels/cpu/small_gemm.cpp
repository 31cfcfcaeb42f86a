// Small products whose right operand is read in place: for a few rows, packing it would cost as much as
// multiplying.
#include "kernels/cpu/small_gemm.hpp"

#include <algorithm>
#include <cstring>

namespace moe::cpu {
namespace {

// Six rows of two vectors leave four of the sixteen AVX2 registers for the operands.
constexpr std::int64_t lanes = 8, tile_rows = 6, tile_columns = 2 * lanes;
using Vector [[gnu::vector_size(lanes * sizeof(float))]] = float;

Vector load(const float* x) {
    Vector v;
    std::memcpy(&v, x, sizeof v);
    return v;
}
void store(float* x, Vector v) { std::memcpy(x, &v, sizeof v); }

// C[rows, 8 vectors] += A B over the whole contraction, in registers.
template <int rows, int vectors>
void tile(const SmallGemm& s, const float* a, const float* b, float* c) {
    Vector sum[rows][vectors] = {};
    for (std::int64_t l = 0; l < s.k; ++l) {
        Vector right[vectors];
        for (int v = 0; v < vectors; ++v) right[v] = load(b + l * s.ldb + v * lanes);
        for (int r = 0; r < rows; ++r) {
            const Vector left = a[r * s.lda + l] - Vector{};
            for (int v = 0; v < vectors; ++v) sum[r][v] += left * right[v];
        }
    }
    for (int r = 0; r < rows; ++r) {
        for (int v = 0; v < vectors; ++v) {
            float* at = c + r * s.ldc + v * lanes;
            store(at, load(at) + sum[r][v]);
        }
    }
}

// The last n % 8 columns.
void edge(const SmallGemm& s, std::int64_t rows, std::int64_t columns, const float* a, const float* b, float* c) {
    for (std::int64_t r = 0; r < rows; ++r) {
        float sum[lanes] = {};
        for (std::int64_t l = 0; l < s.k; ++l) {
            for (std::int64_t j = 0; j < columns; ++j) sum[j] += a[r * s.lda + l] * b[l * s.ldb + j];
        }
        for (std::int64_t j = 0; j < columns; ++j) c[r * s.ldc + j] += sum[j];
    }
}

template <int vectors>
void strip(const SmallGemm& s, std::int64_t rows, const float* a, const float* b, float* c) {
    switch (rows) {
    case 6:
        return tile<6, vectors>(s, a, b, c);
    case 5:
        return tile<5, vectors>(s, a, b, c);
    case 4:
        return tile<4, vectors>(s, a, b, c);
    case 3:
        return tile<3, vectors>(s, a, b, c);
    case 2:
        return tile<2, vectors>(s, a, b, c);
    default:
        return tile<1, vectors>(s, a, b, c);
    }
}

} // namespace

void multiply_small(const SmallGemm& s, const float* a, const float* b, float* c) {
    for (std::int64_t j = 0; j < s.n; j += tile_columns) {
        const std::int64_t columns = std::min(s.n - j, tile_columns), whole = columns / lanes * lanes;
        for (std::int64_t i = 0; i < s.m; i += tile_rows) {
            const std::int64_t rows = std::min(s.m - i, tile_rows);
            const float* left = a + i * s.lda;
            const float* right = b + j;
            float* out = c + i * s.ldc + j;
            if (columns == tile_columns) {
                strip<2>(s, rows, left, right, out);
                continue;
            }
            if (whole > 0) strip<1>(s, rows, left, right, out);
            edge(s, rows, columns - whole, left, right + whole, out + whole);
        }
    }
}

} // namespace moe::cpu
