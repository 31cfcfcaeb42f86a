// The tools that the tests of packed kernels share: the CUDA table beside the CPU's, over storage types and odd
// addresses.
#pragma once

#include "tests/kernels/case.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <array>

namespace moe::test {

using Outputs = std::vector<Tensor>;

// `run` fills fresh outputs by either table. Each may be off the exact result by the op's tolerance, so that they may
// be twice that apart.
template <class Run>
void compare(const std::string& name, Run run) {
    INFO(name, " MOE_TEST_SEED=", seed());
    const Outputs want = run(cpu_kernels()), got = run(table());
    REQUIRE(want.size() == got.size());
    for (std::size_t i = 0; i < want.size(); ++i) {
        INFO("output ", i);
        CHECK(relative_error(got[i].values(), want[i].values()) <= 2.0 * tolerance(want[i].type()));
    }
}

inline constexpr std::array<Type, 2> storages{Type::f32, Type::bf16};

// A tensor whose elements begin `skipped` behind its start, at an address where no pack begins.
struct Shifted {
    Tensor tensor;
    std::int64_t skipped;
    Shifted(Tensor t, std::int64_t n) : tensor(std::move(t)), skipped(n) {}
    Src src() const { return tensor.src() + skipped; }
    Dst dst() { return tensor.dst() + skipped; }
};

inline std::string named(const char* op, std::int64_t rows, std::int64_t cols, std::initializer_list<Type> of) {
    std::string out = fmt::format("{} {}x{}", op, rows, cols);
    for (const Type t : of) out += " " + name_of(t);
    return out;
}

} // namespace moe::test
