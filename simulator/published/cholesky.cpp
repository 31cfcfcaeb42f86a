// Decomposes row by row, so that the inner loop runs along two rows.
#include "simulator/published/cholesky.hpp"

#include "planner/base/error.hpp"

#include <cmath>
#include <numeric>

namespace moe::published {

Cholesky::Cholesky(std::vector<double> lower) : lower_(std::move(lower)) {
    while (size_ * (size_ + 1) / 2 < lower_.size()) ++size_;
    for (std::size_t i = 0; i < size_; ++i) {
        double* const row = lower_.data() + i * (i + 1) / 2;
        for (std::size_t j = 0; j <= i; ++j) {
            const double* const other = lower_.data() + j * (j + 1) / 2;
            const double left = row[j] - std::inner_product(row, row + j, other, 0.0);
            if (j < i) {
                row[j] = left / other[j];
            } else if (left > 0.0) {
                row[i] = std::sqrt(left);
            } else {
                fail("a covariance of {} rows is not positive definite at row {}", size_, i);
            }
        }
    }
}

Vector Cholesky::whitened(Vector b) const {
    for (std::size_t i = 0; i < size_; ++i) {
        for (std::size_t j = 0; j < i; ++j) b[i] -= at(i, j) * b[j];
        b[i] /= at(i, i);
    }
    return b;
}

Vector Cholesky::solve(Vector b) const {
    b = whitened(std::move(b));
    for (std::size_t i = size_; i-- > 0;) {
        b[i] /= at(i, i);
        for (std::size_t j = 0; j < i; ++j) b[j] -= at(i, j) * b[i];
    }
    return b;
}

} // namespace moe::published
