// C += A B for products too small to pack, FP32 and row-major.
#pragma once

#include <cstdint>

namespace moe::cpu {

struct SmallGemm {
    std::int64_t m = 0, n = 0, k = 0;
    std::int64_t lda = 0, ldb = 0, ldc = 0;

    // B fits the second-level cache of common processors with room to spare, so its rows can be read again and again,
    // and the contraction is long enough that reading and writing C once more does not matter.
    bool worthwhile() const { return n * k <= (std::int64_t{1} << 16) && k >= 64; }
};

// c[m, n] += a[m, k] b[k, n]; c overlaps neither.
void multiply_small(const SmallGemm& shape, const float* a, const float* b, float* c);

} // namespace moe::cpu
