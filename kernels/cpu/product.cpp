// FP32 products by Eigen, but for those that are too small to pack.
#include "kernels/cpu/product.hpp"

#include "kernels/cpu/small_gemm.hpp"

#include <Eigen/Core>

namespace moe::cpu {

void add_product(const Product& p, const float* a, const float* b, float* c) {
    using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
    using In = Eigen::Map<const Matrix, 0, Eigen::OuterStride<>>;
    const SmallGemm small{p.m, p.n, p.k, p.lda, p.ldb, p.ldc};
    if (!p.transpose_a && !p.transpose_b && small.worthwhile()) return multiply_small(small, a, b, c);
    const In left(a, p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k, Eigen::OuterStride<>(p.lda));
    const In right(b, p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n, Eigen::OuterStride<>(p.ldb));
    Eigen::Map<Matrix, 0, Eigen::OuterStride<>> out(c, p.m, p.n, Eigen::OuterStride<>(p.ldc));
    if (!p.transpose_a && !p.transpose_b) {
        out.noalias() += left * right;
    } else if (!p.transpose_a) {
        out.noalias() += left * right.transpose();
    } else if (!p.transpose_b) {
        out.noalias() += left.transpose() * right;
    } else {
        out.noalias() += left.transpose() * right.transpose();
    }
}

} // namespace moe::cpu
