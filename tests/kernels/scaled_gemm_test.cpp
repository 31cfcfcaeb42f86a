// Grouped products of scaled E4M3 operands, and of E5M2 by E4M3, against triple loops in double.
#include "kernels/fp8.hpp"
#include "tests/kernels/case.hpp"
#include "tests/kernels/tracked.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <cmath>
#include <numeric>

namespace moe::test {
namespace {

using Bytes = std::vector<std::uint8_t, Tracked<std::uint8_t>>;
constexpr std::uint8_t nan_byte = 0x7f, e5m2_infinity = 0x7c;

// Every value below `end`, subnormal ones and both zeros among them.
void draw(Random& random, Bytes& bytes, std::int64_t count, std::uint8_t end) {
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int32_t magnitude = random.below(end);
        bytes[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(magnitude | random.below(2) << 7);
    }
}

struct Data {
    ScaledShape s;
    Index counts;
    Bytes a, b;
    Tensor a_scale, b_scale, c;
};

std::int64_t blocks_of(std::int64_t elements) { return (elements + scale_block - 1) / scale_block; }

double element(const Data& d, int group, std::int64_t row, std::int64_t col) {
    const std::int64_t blocks = blocks_of(d.s.k);
    double sum = 0.0;
    for (std::int64_t k = 0; k < d.s.k; ++k) {
        const std::uint8_t byte = d.a[static_cast<std::size_t>(row * d.s.k + k)];
        const double a = d.s.e5m2 ? float_of_e5m2(byte) : float_of_e4m3(byte);
        const double b = float_of_e4m3(d.b[static_cast<std::size_t>((group * d.s.n + col) * d.s.k + k)]);
        const double scale = d.a_scale.at(row * blocks + k / scale_block) *
                             d.b_scale.at((group * blocks_of(d.s.n) + col / scale_block) * blocks + k / scale_block);
        sum += a * b * scale;
    }
    return sum;
}

// Rows beyond the counts are NaN, bytes and scales, and must stay poison in the result. No counts: a dense product.
Case scaled_case(const Index& counts, std::int64_t n, std::int64_t k, std::int64_t capacity, Type result, bool e5m2) {
    const auto groups = counts.empty() ? 1 : static_cast<int>(counts.size());
    const Index rows_of = counts.empty() ? Index{static_cast<int>(capacity)} : counts;
    const std::int64_t rows = std::min<std::int64_t>(std::accumulate(rows_of.begin(), rows_of.end(), 0), capacity);
    Case out;
    out.name = fmt::format("scaled_gemm{} counts {} n {} k {} capacity {} -> {}", e5m2 ? " E5M2" : "",
                           fmt::join(counts, ","), n, k, capacity, name_of(result));
    Random random(out.name);
    const std::int64_t blocks = blocks_of(k);
    auto d = std::make_shared<Data>(Data{{groups, n, k, capacity, e5m2},
                                         counts,
                                         Bytes(static_cast<std::size_t>(capacity * k), nan_byte),
                                         Bytes(static_cast<std::size_t>(groups * n * k)),
                                         Tensor(Type::f32, capacity * blocks),
                                         Tensor(Type::f32, groups * blocks_of(n) * blocks),
                                         Tensor(result, capacity * n)});
    draw(random, d->a, rows * k, e5m2 ? e5m2_infinity : nan_byte);
    draw(random, d->b, groups * n * k, nan_byte);
    for (std::int64_t i = 0; i < rows * blocks; ++i) d->a_scale.set(i, std::exp(random.normal(1)[0]));
    for (std::int64_t i = 0; i < d->b_scale.size(); ++i) d->b_scale.set(i, std::exp(random.normal(1)[0]));
    out.tolerance = tolerance(result);
    out.flops = 2.0 * static_cast<double>(rows * n) * static_cast<double>(k);
    out.bytes = static_cast<double>(rows * k + groups * n * k) +
                static_cast<double>(rows * n) * static_cast<double>(size_of(result));
    out.call = [d] {
        table().scaled_gemm(d->s, d->a.data(), d->a_scale.f32(), d->b.data(), d->b_scale.f32(),
                            d->counts.empty() ? nullptr : d->counts.data(), d->c.dst(), nullptr);
    };
    out.error = [d, rows, rows_of] {
        Vec want;
        std::int64_t row = 0;
        for (int e = 0; e < d->s.groups; ++e) {
            for (int i = 0; i < rows_of[static_cast<std::size_t>(e)] && row < rows; ++i, ++row) {
                for (std::int64_t col = 0; col < d->s.n; ++col) want.push_back(element(*d, e, row, col));
            }
        }
        return worst({relative_error(d->c.values(0, rows * d->s.n), want),
                      demand(d->c.untouched(rows * d->s.n, (d->s.capacity - rows) * d->s.n))});
    };
    return out;
}

} // namespace

TEST_CASE("scaled_gemm: E4M3 has the values of its definition") {
    CHECK(float_of_e4m3(0x00) == 0.0f);
    CHECK(float_of_e4m3(0x01) == std::ldexp(1.0f, -9));
    CHECK(float_of_e4m3(0x08) == std::ldexp(1.0f, -6));
    CHECK(float_of_e4m3(0x38) == 1.0f);
    CHECK(float_of_e4m3(0xbc) == -1.5f);
    CHECK(float_of_e4m3(0x7e) == 448.0f);
    CHECK(std::isnan(float_of_e4m3(0x7f)));
    for (int x = 1; x < nan_byte; ++x) {
        CHECK(float_of_e4m3(static_cast<std::uint8_t>(x)) > float_of_e4m3(static_cast<std::uint8_t>(x - 1)));
    }
}

TEST_CASE("scaled_gemm: E5M2 has the values of its definition, and each becomes its own byte again") {
    CHECK(float_of_e5m2(0x01) == std::ldexp(1.0f, -16));
    CHECK(float_of_e5m2(0x04) == std::ldexp(1.0f, -14));
    CHECK(float_of_e5m2(0x3c) == 1.0f);
    CHECK(float_of_e5m2(0xbe) == -1.5f);
    CHECK(float_of_e5m2(0x7b) == 57344.0f);
    CHECK(std::isinf(float_of_e5m2(e5m2_infinity)));
    CHECK(std::isnan(float_of_e5m2(0x7d)));
    for (int x = 0; x < 256; ++x) {
        const auto byte = static_cast<std::uint8_t>(x);
        if (std::isfinite(float_of_e5m2(byte))) CHECK(e5m2_of_float(float_of_e5m2(byte)) == byte);
    }
    CHECK(e5m2_of_float(std::ldexp(1.0f, -17)) == 0x00); // half of the smallest: to even
    CHECK(e5m2_of_float(1.125f) == 0x3c);                // between 1 and 1.25: to even
    CHECK(e5m2_of_float(1.375f) == 0x3e);                // between 1.25 and 1.5: to even
    CHECK(e5m2_of_float(-1e9f) == 0xfb);
    CHECK(e5m2_of_float(INFINITY) == 0x7b);
    CHECK(e5m2_of_float(std::nanf("")) == 0x7f);
}

TEST_CASE("scaled_gemm: parts of blocks and tiles, empty, single-row and lone groups, counts beyond the capacity") {
    for (const auto& [result, e5m2] : {std::pair{Type::f32, false}, std::pair{Type::bf16, false},
                                       std::pair{Type::f32, true}, std::pair{Type::bf16, true}}) {
        check(scaled_case({3, 0, 1, 5}, 13, 7, 12, result, e5m2));
        check(scaled_case({130, 0, 1, 77}, 264, 144, 230, result, e5m2));
        check(scaled_case({15, 16, 33, 65, 129}, 136, 272, 258, result, e5m2));
        check(scaled_case({0, 0, 200, 0}, 72, 384, 300, result, e5m2));
        check(scaled_case({100, 60}, 128, 128, 130, result, e5m2)); // cut at the capacity
        check(scaled_case({0, 0}, 16, 16, 4, result, e5m2));
        check(scaled_case({300}, 400, 160, 300, result, e5m2));
        check(scaled_case({}, 200, 256, 190, result, e5m2));
        check(scaled_case({}, 272, 384, 192, result, e5m2)); // dense and aligned: a library's, where there is one
        check(scaled_case({}, 128, 1024, 160, result, e5m2));
        check(scaled_case({}, 144, 208, 272, result, e5m2));
    }
}

} // namespace moe::test
