// One FP32 product, C += op(A) op(B): where the CPU's products spend their time.
#pragma once

#include <cstdint>

namespace moe::cpu {

// Row-major; what is transposed is stored with the contracted index first (A) or last (B).
struct Product {
    std::int64_t m = 0, n = 0, k = 0;
    std::int64_t lda = 0, ldb = 0, ldc = 0;
    bool transpose_a = false, transpose_b = false;
};

// c[m, n] += op(a)[m, k] op(b)[k, n]; c overlaps neither. Under the sanitizers this is compiled without them, so that
// it takes a tenth of the time: operands are watched as a whole before it (watched.hpp).
void add_product(const Product& product, const float* a, const float* b, float* c);

} // namespace moe::cpu
