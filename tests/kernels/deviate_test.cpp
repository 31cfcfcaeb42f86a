// Normal deviates against Box-Muller by the standard library, and their bits, which are the same from every back end.
#include "kernels/bf16.hpp"
#include "kernels/deviate.hpp"
#include "tests/kernels/case.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <numbers>

namespace moe::test {
namespace {

double deviate(std::uint64_t key, std::int64_t index) {
    const std::uint64_t bits = splitmix(key ^ splitmix(static_cast<std::uint64_t>(index)));
    const double u = (static_cast<double>(bits >> 32) + 1.0) * 0x1p-32,
                 v = static_cast<double>(bits & 0xffffffffu) * 0x1p-32;
    return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
}

Case deviate_case(std::int64_t first, std::int64_t n, double scale) {
    Case out;
    out.name = fmt::format("draw_normal {} from {} scale {}", n, first, scale);
    auto y = std::make_shared<Tensor>(Type::f32, n);
    out.flops = 60.0 * static_cast<double>(n);
    out.bytes = 4.0 * static_cast<double>(n);
    out.call = [=] { table().draw_normal(7, first, scale, y->f32(), n, nullptr); };
    out.error = [=] {
        Vec want;
        for (std::int64_t i = 0; i < n; ++i) want.push_back(scale * deviate(7, first + i));
        return relative_error(*y, want);
    };
    return out;
}

} // namespace

TEST_CASE("draw_normal: the deviates of a counter, wherever a call begins") {
    for (const std::int64_t n : {1, 5, 1023, 4097}) check(deviate_case(0, n, 1.0));
    check(deviate_case((std::int64_t{1} << 40) + 3, 300, 0.02));
}

TEST_CASE("draw_normal: mean 0, deviation 1, tails, and a call in two parts is one") {
    constexpr std::int64_t n = 1 << 16;
    Tensor y(Type::f32, n), part(Type::f32, 1000);
    table().draw_normal(3, 0, 1.0, y.f32(), n, nullptr);
    table().draw_normal(3, 500, 1.0, part.f32(), 1000, nullptr);
    double sum = 0.0, squares = 0.0, beyond = 0.0;
    for (const double x : y.values()) sum += x, squares += x * x, beyond += std::abs(x) > 2.0;
    CHECK(std::abs(sum / n) < 0.02);
    CHECK(squares / n == nearly(1.0).epsilon(0.02));
    CHECK(beyond / n == nearly(0.0455).epsilon(0.05));
    CHECK(part.values() == y.values(500, 1000));
}

// A model must not begin with other weights depending on where it is trained.
TEST_CASE("draw_normal: the same bits from every back end") {
    constexpr std::int64_t n = 100'000;
    Tensor y(Type::f32, n);
    table().draw_normal(1, 12345, 0.02, y.f32(), n, nullptr);
    std::uint64_t hash = 0;
    for (std::int64_t i = 0; i < n; ++i)
        hash = splitmix(hash ^ std::bit_cast<std::uint32_t>(static_cast<float>(y.at(i))));
    CHECK(hash == 2389058397107144386u);
}

} // namespace moe::test
