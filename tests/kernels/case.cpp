// Test tensors with poisoned storage, seeded random numbers, norm-wise comparison and numeric gradients.
#include "tests/kernels/case.hpp"

#include "kernels/bf16.hpp"
#include "tests/support/draws.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace moe::test {
namespace {

// A NaN in either type, with a payload that no arithmetic produces.
constexpr unsigned char poison_byte = 0xff;

std::size_t bytes_for(Type type, std::int64_t elements) { return static_cast<std::size_t>(elements) * size_of(type); }

std::vector<Checked>& checked() {
    static std::vector<Checked> list;
    return list;
}

} // namespace

std::string name_of(Type type) { return type == Type::f32 ? "f32" : "bf16"; }

Tensor::Tensor(Type type, std::int64_t elements) : type_(type), bytes_(bytes_for(type, elements), poison_byte) {}
Tensor::Tensor(Type type, const Vec& values) : Tensor(type, static_cast<std::int64_t>(values.size())) {
    for (std::size_t i = 0; i < values.size(); ++i) set(static_cast<std::int64_t>(i), values[i]);
}

std::int64_t Tensor::size() const { return static_cast<std::int64_t>(bytes_.size() / size_of(type_)); }

double Tensor::at(std::int64_t i) const {
    const unsigned char* at = bytes_.data() + bytes_for(type_, i);
    if (type_ == Type::f32) {
        float value;
        std::memcpy(&value, at, sizeof value);
        return static_cast<double>(value);
    }
    std::uint16_t bits;
    std::memcpy(&bits, at, sizeof bits);
    return static_cast<double>(float_of_bf16(bits));
}

void Tensor::set(std::int64_t i, double value) {
    unsigned char* at = bytes_.data() + bytes_for(type_, i);
    const auto single = static_cast<float>(value);
    if (type_ == Type::f32) {
        std::memcpy(at, &single, sizeof single);
    } else {
        const std::uint16_t bits = bf16_of_float(single);
        std::memcpy(at, &bits, sizeof bits);
    }
}

Vec Tensor::values() const { return values(0, size()); }
Vec Tensor::values(std::int64_t from, std::int64_t count) const {
    Vec out(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = at(from + static_cast<std::int64_t>(i));
    return out;
}

void Tensor::poison() { std::fill(bytes_.begin(), bytes_.end(), poison_byte); }

bool Tensor::untouched(std::int64_t from, std::int64_t count) const {
    const auto first = bytes_.begin() + static_cast<std::ptrdiff_t>(bytes_for(type_, from));
    return std::all_of(first, first + static_cast<std::ptrdiff_t>(bytes_for(type_, count)),
                       [](unsigned char byte) { return byte == poison_byte; });
}

std::uint64_t seed() { return environment("MOE_TEST_SEED", 1); }

Random::Random(const std::string& name) {
    std::seed_seq parts{static_cast<std::uint64_t>(std::hash<std::string>{}(name)), seed()};
    engine_.seed(parts);
}

Vec Random::normal(std::int64_t n, double scale) {
    std::normal_distribution<double> distribution(0.0, scale);
    Vec out(static_cast<std::size_t>(n));
    for (double& x : out) x = distribution(engine_);
    return out;
}

std::int32_t Random::below(std::int32_t n) { return std::uniform_int_distribution<std::int32_t>(0, n - 1)(engine_); }

Index Random::indices(std::int64_t n, std::int32_t limit) {
    Index out(static_cast<std::size_t>(n));
    for (std::int32_t& i : out) i = below(limit);
    return out;
}

void check(const Case& c) {
    c.call();
    const double error = c.error();
    checked().push_back({c.name, error, c.tolerance});
    INFO(c.name, ": relative error ", error, ", allowed ", c.tolerance, ", MOE_TEST_SEED=", seed());
    CHECK(error <= c.tolerance);
}

const std::vector<Checked>& all_checked() { return checked(); }

double relative_error(const Vec& got, const Vec& want) {
    if (got.size() != want.size()) return std::numeric_limits<double>::infinity();
    double difference = 0.0, size = 0.0;
    for (std::size_t i = 0; i < got.size(); ++i) {
        difference += (got[i] - want[i]) * (got[i] - want[i]);
        size += want[i] * want[i];
    }
    if (!std::isfinite(difference)) return std::numeric_limits<double>::infinity();
    return size > 0.0 ? std::sqrt(difference / size) : std::sqrt(difference);
}

double worst(std::initializer_list<double> errors) { return std::max(errors); }

double demand(bool condition) { return condition ? 0.0 : std::numeric_limits<double>::infinity(); }

Vec gradient(const std::function<Vec(const Vec&)>& f, const Vec& x, const Vec& dy) {
    const auto objective = [&](const Vec& at) {
        const Vec y = f(at);
        REQUIRE(y.size() == dy.size());
        double sum = 0.0;
        for (std::size_t i = 0; i < y.size(); ++i) sum += dy[i] * y[i];
        return sum;
    };
    Vec at = x, out(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
        const double step = 1e-5 * std::max(1.0, std::abs(x[i]));
        at[i] = x[i] + step;
        const double above = objective(at);
        at[i] = x[i] - step;
        const double below = objective(at);
        at[i] = x[i];
        out[i] = (above - below) / (2.0 * step);
    }
    return out;
}

Vec plus(Vec a, const Vec& b) {
    for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
    return a;
}

} // namespace moe::test
