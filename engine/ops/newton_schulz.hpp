// Newton-Schulz: the orthogonal factor of a matrix by matrix products alone.
#pragma once

#include "kernels/kernels.hpp"

#include <array>
#include <cstdint>

namespace moe::ops {

// Where it works: `work` holds newton_schulz_elements() of FP32 or BF16, which is the precision of its products'
// operands (sums are FP32); norm [1]; hyper as AdamW's, whose eps is the least norm that is divided by.
struct NewtonSchulzSpace {
    Dst work;
    float* norm = nullptr;
    const float* hyper = nullptr;
};
std::int64_t newton_schulz_elements(std::int64_t rows, std::int64_t cols);

// Five iterations X -> a X + b (X X^T) X + c (X X^T)^2 X with a = 3.4445, b = -4.7750, c = 2.0315, from the matrix over
// its Frobenius norm (Jordan and others, "Muon: An optimizer for hidden layers in neural networks", 2024; arXiv
// 2502.16982 section 2.1). Tall matrices are multiplied from the right, so that squares have the short side. Singular
// values above a hundredth of the norm end between 0.68 and 1.14.
class NewtonSchulz {
public:
    NewtonSchulz(const Kernels& kernels, void* stream, const NewtonSchulzSpace& space, std::int64_t rows,
                 std::int64_t cols);
    Dst x() const { return x_; }     // the matrix [rows, cols]: written before run(), read behind it
    Dst spare() const { return y_; } // as large, free outside of run()
    void run();

private:
    const Kernels& kernels_;
    void* stream_;
    float* norm_;
    const float* hyper_;
    std::int64_t rows_, cols_, short_;
    Dst x_, y_;
    std::array<Dst, 3> squares_;
};

} // namespace moe::ops
