// One op test: parameters in a name, a tolerance, FLOPs and bytes, the call, and its error against a double reference.
#pragma once

#include "kernels/kernels.hpp"
#include "tests/kernels/tracked.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace moe::test {

// The back end under test; each executable says which.
const Kernels& table();

using Vec = std::vector<double>;

// Largest relative error ||got - want|| / ||want|| that a case allows. FP32: sums of up to some thousand products of
// numbers around 1. BF16: rounding of the result to 8 bits, 2^-9 at most; inputs are rounded before either side reads
// them.
inline constexpr double f32_tolerance = 3e-6;
inline constexpr double bf16_tolerance = 4e-3;
inline double tolerance(Type type) { return type == Type::f32 ? f32_tolerance : bf16_tolerance; }
std::string name_of(Type type);

// Elements in storage precision, exactly as many bytes as they need (so that ASan sees every step outside), all NaN at
// first.
class Tensor {
public:
    Tensor(Type type, std::int64_t elements);
    Tensor(Type type, const Vec& values);

    Src src() const { return {bytes_.data(), type_}; }
    Dst dst() { return {bytes_.data(), type_}; }
    float* f32() { return static_cast<float*>(static_cast<void*>(bytes_.data())); }
    const float* f32() const { return static_cast<const float*>(static_cast<const void*>(bytes_.data())); }
    Type type() const { return type_; }
    std::int64_t size() const;
    double at(std::int64_t i) const;
    void set(std::int64_t i, double value);
    Vec values() const;
    Vec values(std::int64_t from, std::int64_t count) const;
    void poison();
    bool untouched(std::int64_t from, std::int64_t count) const; // still the poison of before the call, bit for bit

private:
    Type type_;
    std::vector<unsigned char, Tracked<unsigned char>> bytes_;
};

using Index = std::vector<std::int32_t, Tracked<std::int32_t>>;

// Seeded by MOE_TEST_SEED (default 1) and the name of the case, so that a case repeats alone as in the whole suite.
class Random {
public:
    explicit Random(const std::string& name);
    Vec normal(std::int64_t n, double scale = 1.0);
    Tensor tensor(Type type, std::int64_t n, double scale = 1.0) { return Tensor(type, normal(n, scale)); }
    std::int32_t below(std::int32_t n);
    Index indices(std::int64_t n, std::int32_t below);

private:
    std::mt19937_64 engine_;
};
std::uint64_t seed();

struct Case {
    std::string name;
    double tolerance = f32_tolerance;
    double flops = 0.0, bytes = 0.0; // of one call; bytes: the least that must be read and written
    std::function<void()> call;      // may be repeated (accumulated outputs grow)
    std::function<double()> error;   // after one call; infinite where something was touched that must not be
};

// Runs the case once and checks its error; a failure prints the name, the seed, the error and the tolerance.
void check(const Case& c);

struct Checked {
    std::string name;
    double error = 0.0, tolerance = 0.0;
};
// The list of what check() has seen so far, for a report.
const std::vector<Checked>& all_checked();

double relative_error(const Vec& got, const Vec& want);
inline double relative_error(const Tensor& got, const Vec& want) { return relative_error(got.values(), want); }
double worst(std::initializer_list<double> errors);
double demand(bool condition); // 0 if true, infinite if not

// Gradient of sum(dy * f(x)) by central differences in double; good to about 1e-9 of the gradient's norm.
Vec gradient(const std::function<Vec(const Vec&)>& f, const Vec& x, const Vec& dy);
Vec plus(Vec a, const Vec& b);

// The cases that the benchmark times, at sizes of a small model's layer.
std::vector<Case> activation_benchmarks();
std::vector<Case> attention_benchmarks();
std::vector<Case> gemm_benchmarks();
std::vector<Case> loss_benchmarks();
std::vector<Case> mxfp8_benchmarks();
std::vector<Case> norm_benchmarks();
std::vector<Case> optimizer_benchmarks();
std::vector<Case> permute_benchmarks();
std::vector<Case> quantize_benchmarks();
std::vector<Case> quantize_columns_benchmarks();
std::vector<Case> rope_benchmarks();
std::vector<Case> round_benchmarks();
std::vector<Case> router_benchmarks();
std::vector<Case> sinkhorn_benchmarks();
std::vector<Case> state_benchmarks();

} // namespace moe::test
