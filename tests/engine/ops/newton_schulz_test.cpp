// Newton-Schulz against its formula on singular values, for matrices whose decomposition is known.
#include "engine/ops/newton_schulz.hpp"
#include "kernels/bf16.hpp"
#include "kernels/deviate.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <vector>

using namespace moe;

namespace {

using Matrix = std::vector<double>; // row-major

// The Householder reflection of a random vector: orthogonal and symmetric.
Matrix reflection(std::int64_t n, std::uint64_t key) {
    std::vector<float> v(static_cast<std::size_t>(n));
    cpu_kernels().draw_normal(key, 0, 1.0, v.data(), n, nullptr);
    double square = 0.0;
    for (const float x : v) square += static_cast<double>(x) * static_cast<double>(x);
    Matrix h(static_cast<std::size_t>(n * n));
    for (std::int64_t i = 0; i < n; ++i)
        for (std::int64_t j = 0; j < n; ++j)
            h[static_cast<std::size_t>(i * n + j)] =
                (i == j ? 1.0 : 0.0) -
                2.0 * static_cast<double>(v[static_cast<std::size_t>(i)]) * v[static_cast<std::size_t>(j)] / square;
    return h;
}

// U diag(s) V^T, with U and V reflections.
Matrix from_singular(std::int64_t rows, std::int64_t cols, const std::vector<double>& s) {
    const Matrix u = reflection(rows, 3), v = reflection(cols, 5);
    Matrix x(static_cast<std::size_t>(rows * cols), 0.0);
    for (std::int64_t i = 0; i < rows; ++i)
        for (std::int64_t j = 0; j < cols; ++j)
            for (std::size_t r = 0; r < s.size(); ++r)
                x[static_cast<std::size_t>(i * cols + j)] +=
                    u[static_cast<std::size_t>(i * rows) + r] * s[r] * v[static_cast<std::size_t>(j * cols) + r];
    return x;
}

double five_times(double s) {
    for (int i = 0; i < 5; ++i) s = 3.4445 * s - 4.7750 * s * s * s + 2.0315 * s * s * s * s * s;
    return s;
}

Matrix orthogonalized(std::int64_t rows, std::int64_t cols, const Matrix& x, Type type, float eps) {
    const auto elements = static_cast<std::size_t>(ops::newton_schulz_elements(rows, cols));
    std::vector<float> wide(elements);
    std::vector<std::uint16_t> narrow(elements);
    float norm = 5.0f;
    const float hyper[9] = {0.0f, 0.0f, 0.0f, eps};
    const Dst work = type == Type::f32 ? Dst{wide.data(), type} : Dst{narrow.data(), type};
    ops::NewtonSchulz product(cpu_kernels(), nullptr, {work, &norm, hyper}, rows, cols);
    const std::vector<float> values(x.begin(), x.end());
    cpu_kernels().cast({values.data(), Type::f32}, product.x(), rows * cols, nullptr);
    product.run();
    std::vector<float> result(values.size());
    cpu_kernels().cast(product.x(), {result.data(), Type::f32}, rows * cols, nullptr);
    return {result.begin(), result.end()};
}

double distance(const Matrix& a, const Matrix& b) {
    double off = 0.0, size = 0.0;
    for (std::size_t i = 0; i < a.size(); ++i) off += (a[i] - b[i]) * (a[i] - b[i]), size += b[i] * b[i];
    return std::sqrt(off / size);
}

} // namespace

TEST_CASE("Newton-Schulz keeps singular vectors and brings singular values near 1") {
    struct Shape {
        std::int64_t rows, cols;
    };
    for (const Shape& shape : {Shape{8, 8}, Shape{7, 33}, Shape{33, 7}, Shape{64, 48}, Shape{2, 130}}) {
        CAPTURE(shape.rows);
        CAPTURE(shape.cols);
        std::vector<double> s;
        double square = 0.0;
        for (std::int64_t i = 0; i < std::min(shape.rows, shape.cols); ++i) {
            s.push_back(std::pow(0.93, static_cast<double>(i)) * 3.0);
            square += s.back() * s.back();
        }
        std::vector<double> moved;
        for (const double value : s) moved.push_back(five_times(value / std::sqrt(square)));
        const Matrix x = from_singular(shape.rows, shape.cols, s), want = from_singular(shape.rows, shape.cols, moved);
        CHECK(distance(orthogonalized(shape.rows, shape.cols, x, Type::f32, 1e-8f), want) < 1e-4);
        CHECK(distance(orthogonalized(shape.rows, shape.cols, x, Type::bf16, 1e-8f), want) < 0.05);
        for (const double value : s)
            if (value > 0.01 * std::sqrt(square)) CHECK(std::abs(five_times(value / std::sqrt(square)) - 0.91) < 0.24);
    }
}

TEST_CASE("a matrix of less than eps stays small, and one of zeros zero") {
    Matrix x(8 * 12, 0.0);
    for (const double value : orthogonalized(8, 12, x, Type::f32, 1e-8f)) CHECK(value == 0.0);
    x[5] = 1e-9;
    double most = 0.0;
    for (const double value : orthogonalized(8, 12, x, Type::f32, 1e-3f)) most = std::max(most, std::abs(value));
    CHECK(most > 0.0);
    CHECK(most < 1e-3);
}
