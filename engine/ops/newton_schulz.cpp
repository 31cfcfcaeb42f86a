// The iteration of Newton and Schulz as products and sums of a back end's kernels.
#include "engine/ops/newton_schulz.hpp"

#include <algorithm>
#include <utility>

namespace moe::ops {

namespace {

constexpr double a = 3.4445, b = -4.7750, c = 2.0315;
constexpr int iterations = 5;

// Operands begin at multiples of 128 elements.
std::int64_t aligned(std::int64_t elements) { return (elements + 127) / 128 * 128; }

} // namespace

std::int64_t newton_schulz_elements(std::int64_t rows, std::int64_t cols) {
    const std::int64_t side = std::min(rows, cols);
    return 2 * aligned(rows * cols) + 3 * aligned(side * side);
}

NewtonSchulz::NewtonSchulz(const Kernels& kernels, void* stream, const NewtonSchulzSpace& space, std::int64_t rows,
                           std::int64_t cols)
    : kernels_(kernels),
      stream_(stream),
      norm_(space.norm),
      hyper_(space.hyper),
      rows_(rows),
      cols_(cols),
      short_(std::min(rows, cols)),
      x_(space.work),
      y_(space.work + aligned(rows * cols)) {
    for (std::size_t i = 0; i < squares_.size(); ++i)
        squares_[i] = space.work + (2 * aligned(rows * cols) + static_cast<std::int64_t>(i) * aligned(short_ * short_));
}

void NewtonSchulz::run() {
    const std::int64_t n = rows_ * cols_, square = short_ * short_;
    kernels_.zero({norm_, Type::f32}, 1, stream_);
    kernels_.sum_squares(x_, norm_, n, stream_);
    kernels_.unit(x_, norm_, hyper_, x_, n, stream_);
    const bool wide = rows_ <= cols_; // X X^T from the left, else X^T X from the right
    const auto [gram, scaled, sum] = squares_;
    for (int i = 0; i < iterations; ++i) {
        GemmShape shape{short_, short_, std::max(rows_, cols_), !wide, wide, false};
        kernels_.gemm(shape, x_, x_, gram, stream_);
        kernels_.scale(gram, {}, c, scaled, square, stream_);
        kernels_.scale(gram, {}, b, sum, square, stream_);
        kernels_.gemm({short_, short_, short_, false, false, true}, scaled, gram, sum, stream_);
        kernels_.scale(x_, {}, a, y_, n, stream_);
        kernels_.gemm({rows_, cols_, short_, false, false, true}, wide ? sum : x_, wide ? x_ : sum, y_, stream_);
        std::swap(x_, y_);
    }
}

} // namespace moe::ops
