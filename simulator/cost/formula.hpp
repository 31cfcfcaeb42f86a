// Seconds of a family's calls as physics has them: a start, a rate of work, one of what lies beside it.
#pragma once

#include "planner/machine/hardware.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

namespace moe::cost {

// Symmetric positive definite system of the first n rows by Cholesky; only the lower triangle is read.
template <std::size_t N>
struct Normal {
    std::array<std::array<double, N>, N> a{};
    std::array<double, N> b{};

    void add(const std::array<double, N>& x, std::size_t n, double y, double weight) {
        for (std::size_t i = 0; i < n; ++i) {
            b[i] += weight * x[i] * y;
            for (std::size_t j = 0; j <= i; ++j) a[i][j] += weight * x[i] * x[j];
        }
    }
    void solve(std::size_t n) { // into b
        for (std::size_t i = 0; i < n; ++i) {
            for (std::size_t j = 0; j <= i; ++j) {
                double sum = a[i][j];
                for (std::size_t k = 0; k < j; ++k) sum -= a[i][k] * a[j][k];
                a[i][j] = i == j ? std::sqrt(std::max(sum, 1e-12)) : sum / a[j][j];
            }
            for (std::size_t k = 0; k < i; ++k) b[i] -= a[i][k] * b[k];
            b[i] /= a[i][i];
        }
        for (std::size_t i = n; i-- > 0;) {
            for (std::size_t k = i + 1; k < n; ++k) b[i] -= a[k][i] * b[k];
            b[i] /= a[i][i];
        }
    }
};

// The work that a family's calls take of the tensor cores: the waves of the tiles that its kernels choose, where those
// are known, so that experts of 640 columns fill 5 of 6 tiles of 128. Other work is what it is.
class TensorWork {
public:
    TensorWork(const machine::Hardware& hardware, const std::string& key);
    double operator()(double work, std::vector<double> sides) const;

private:
    int multiprocessors_;
    bool gradient_ = false, to_inputs_ = false;
    std::vector<machine::ProductTile> tiles_;
};

// A start, a rate of work and one of what lies beside it (beside_work()): of the three, or of those of them that a
// family has, the combination of no negative term that is nearest to all its calls by their relative errors. Products
// move their operands while they multiply: the root of the sum of squares of both. Leaving single calls of two H200 and
// two H100 out, dense products in BF16 are 7 % off so and 9 % where both are added up; attention, which has sums that
// begin and end after each other, 10 % and 9 %.
class Formula {
public:
    // `calls` holds at least one call; all have the same number of sides and are sorted by work.
    Formula(const machine::Hardware& hardware, const std::string& key, const std::vector<machine::MeasuredCall>& calls);
    double operator()(double work, const std::vector<double>& sides) const; // seconds

private:
    using Terms = std::array<double, 3>;
    Terms scaled(double work, const std::vector<double>& sides, double seconds) const;
    Terms linear(Terms x) const;
    Terms nearest(const Normal<3>& all) const;

    std::string key_;
    TensorWork work_;
    bool overlaps_;
    Terms unit_{}, share_{};
};

} // namespace moe::cost
