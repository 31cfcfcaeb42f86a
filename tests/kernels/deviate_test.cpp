// Normal deviates against Box-Muller by the standard library, noise on routers' inputs against its rule, and the bits
// of both, which are the same from every back end.
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

// Vigna's splitmix64 as published, with its state: next() of a state that has made `steps` numbers.
std::uint64_t splitmix64(std::uint64_t state, std::uint64_t steps) {
    std::uint64_t z = state + (steps + 1) * 0x9e3779b97f4a7c15ULL;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ z >> 27) * 0x94d049bb133111ebULL;
    return z ^ z >> 31;
}

constexpr std::uint64_t noise_key = 0xfedcba9876543210u;
Index noise_of(std::int32_t first_sequence) {
    return {static_cast<std::int32_t>(noise_key & 0xffffffffu), static_cast<std::int32_t>(noise_key >> 32),
            first_sequence};
}

// By the rule in kernels/deviate.hpp, in double.
double noise(int layer, std::int64_t sequence, std::int64_t position, std::int64_t col, double eps) {
    const std::uint64_t of_layer = splitmix64(noise_key ^ splitmix64(static_cast<std::uint64_t>(layer), 0), 0),
                        place = static_cast<std::uint64_t>(sequence) * (std::uint64_t{1} << 32) +
                                static_cast<std::uint64_t>(position),
                        row = splitmix64(of_layer ^ splitmix64(place, 0), 0),
                        bits = splitmix64(row, static_cast<std::uint64_t>(col / 4));
    const auto n = static_cast<double>(bits >> 16 * (col % 4) & 0xffffu);
    return 1.0 + (2.0 * n - 65535.0) * eps / 65536.0;
}

// Rows of a rank that begins at row `s.first` of its micro-batch, whose positions lie in two runs as under CP.
Case jitter_case(const JitterShape& s, Type type) {
    Case out;
    out.name = fmt::format("jitter {}x{} from {} batch {} layer {} eps {} {}", s.tokens, s.cols, s.first, s.batch,
                           s.layer, s.eps, test::name_of(type));
    Random random(out.name);
    struct Data {
        Tensor x, y;
        Index positions, noise;
    };
    auto d = std::make_shared<Data>(Data{random.tensor(type, s.tokens * s.cols), Tensor(type, s.tokens * s.cols),
                                         Index(static_cast<std::size_t>((s.first + s.tokens + s.batch - 1) / s.batch)),
                                         noise_of(6)});
    for (std::size_t i = 0; i < d->positions.size(); ++i)
        d->positions[i] = static_cast<std::int32_t>(i + (2 * i < d->positions.size() ? 5 : 900));
    out.tolerance = tolerance(type);
    out.flops = 2.0 * static_cast<double>(s.tokens * s.cols);
    out.bytes = 2.0 * static_cast<double>(s.tokens * s.cols) * static_cast<double>(size_of(type));
    out.call = [=] { table().jitter(s, d->x.src(), d->positions.data(), d->noise.data(), d->y.dst(), nullptr); };
    out.error = [=] {
        Vec want = d->x.values();
        for (std::int64_t t = 0; t < s.tokens; ++t) {
            const std::int64_t at = s.first + t, position = d->positions[static_cast<std::size_t>(at / s.batch)];
            for (std::int64_t c = 0; c < s.cols; ++c)
                want[static_cast<std::size_t>(t * s.cols + c)] *= noise(s.layer, 6 + at % s.batch, position, c, s.eps);
        }
        return relative_error(d->y, want);
    };
    return out;
}

JitterShape jitter_shape(std::int64_t tokens, std::int64_t cols, double eps = 0.1) {
    JitterShape s;
    s.tokens = tokens, s.cols = cols, s.eps = eps, s.layer = 3;
    return s;
}

} // namespace

TEST_CASE("jitter: each number times the noise of its step, layer, token and column") {
    for (const Type type : {Type::f32, Type::bf16}) {
        for (const std::int64_t cols : {1, 3, 8, 13, 64, 1032, 2050}) check(jitter_case(jitter_shape(7, cols), type));
        JitterShape part = jitter_shape(9, 24, 0.9);
        part.first = 4, part.batch = 3, part.layer = 61;
        check(jitter_case(part, type));
    }
    JitterShape gone = jitter_shape(0, 8);
    check(jitter_case(gone, Type::f32));
}

TEST_CASE("jitter: rows are the same wherever they lie, uniform, and of mean 1") {
    constexpr std::int64_t rows = 64, cols = 512, n = rows * cols;
    constexpr double eps = 0.25;
    const Tensor ones(Type::f32, Vec(n, 1.0));
    Tensor whole(Type::f32, n), part(Type::f32, n), other(Type::f32, n);
    Index positions;
    for (std::int32_t p = 0; p < rows; ++p) positions.push_back(p);
    const Index noise = noise_of(0), next = noise_of(1);
    JitterShape s = jitter_shape(rows, cols, eps);
    table().jitter(s, ones.src(), positions.data(), noise.data(), whole.dst(), nullptr);
    s.tokens = rows / 2, s.first = rows / 2;
    table().jitter(s, ones.src(), positions.data(), noise.data(), part.dst(), nullptr);
    CHECK(part.values(0, n / 2) == whole.values(n / 2, n / 2));
    s = jitter_shape(rows, cols, eps);
    table().jitter(s, ones.src(), positions.data(), next.data(), other.dst(), nullptr); // another sequence
    Vec eighths(8, 0.0);
    double sum = 0.0, squares = 0.0, along = 0.0;
    for (std::int64_t i = 0; i < n; ++i) {
        const double u = (whole.at(i) - 1.0) / eps, v = (other.at(i) - 1.0) / eps;
        REQUIRE(std::abs(u) < 1.0);
        sum += u, squares += u * u, along += u * v;
        ++eighths[static_cast<std::size_t>(4.0 * (u + 1.0))];
    }
    // Five deviations: of a sum 1 / sqrt(3), of squares sqrt(4 / 45), of products 1 / 3, of a count sqrt(7 / 64).
    const double root = std::sqrt(static_cast<double>(n));
    CHECK(std::abs(sum) < 5.0 * root * std::sqrt(1.0 / 3.0));
    CHECK(std::abs(squares - n / 3.0) < 5.0 * root * std::sqrt(4.0 / 45.0));
    CHECK(std::abs(along) < 5.0 * root / 3.0);
    for (const double count : eighths) CHECK(std::abs(count - n / 8.0) < 5.0 * root * std::sqrt(7.0 / 64.0));
}

// Ranks of different back ends may not route by different noise, and a gradient must pass the noise of its forward.
TEST_CASE("jitter: the same bits from every back end, in place too") {
    constexpr std::int64_t rows = 128, cols = 264, n = rows * cols;
    for (const Type type : {Type::f32, Type::bf16}) {
        const Vec made = [] {
            Vec x;
            for (std::int64_t i = 0; i < n; ++i) x.push_back(static_cast<double>(i * 7919 % 1001 - 500) / 256.0);
            return x;
        }();
        Tensor x(type, made), y(type, n);
        Index positions;
        for (std::int32_t p = 0; p < rows / 2; ++p) positions.push_back(3 * p);
        const Index noise = noise_of(10);
        JitterShape s = jitter_shape(rows, cols, 0.01);
        s.batch = 2;
        table().jitter(s, x.src(), positions.data(), noise.data(), y.dst(), nullptr);
        std::uint64_t hash = 0;
        for (std::int64_t i = 0; i < n; ++i)
            hash = splitmix(hash ^ std::bit_cast<std::uint32_t>(static_cast<float>(y.at(i))));
        CHECK(hash == (type == Type::f32 ? 948668746580566503u : 9248527978615876345u));
        table().jitter(s, x.src(), positions.data(), noise.data(), x.dst(), nullptr);
        CHECK(x.values() == y.values());
    }
}

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
