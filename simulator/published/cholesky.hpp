// The Cholesky decomposition of a covariance matrix of some hundred rows.
#pragma once

#include <cstddef>
#include <vector>

namespace moe::published {

using Vector = std::vector<double>;

class Cholesky {
public:
    Cholesky() = default;
    // The lower half of a symmetric matrix, row by row: entry (i, j), j <= i, is lower[i * (i + 1) / 2 + j]. Throws
    // Error (failure) where it is not positive definite.
    explicit Cholesky(std::vector<double> lower);

    std::size_t size() const { return size_; }
    // x with A x = b; b has size() entries.
    Vector solve(Vector b) const;
    // x with L x = b, A = L L^T: entries of variance 1 that do not depend on each other, where b has the covariance A.
    Vector whitened(Vector b) const;

private:
    double at(std::size_t i, std::size_t j) const { return lower_[i * (i + 1) / 2 + j]; }
    std::size_t size_ = 0;
    std::vector<double> lower_;
};

} // namespace moe::published
