// Runs the op tests, or with "bench [PART OF A NAME]" times the kernels and prints their rates.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include "tests/kernels/case.hpp"
#include "tests/kernels/packed_bytes.hpp"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string_view>

namespace {

using moe::test::Case;

double seconds_of(const Case& c) {
    using Clock = std::chrono::steady_clock;
    const auto once = [&] {
        const auto start = Clock::now();
        c.call();
        return std::chrono::duration<double>(Clock::now() - start).count();
    };
    once(); // page faults and scratch
    double best = once(), spent = best;
    for (int i = 0; i < 1000 && spent < 0.15; ++i) {
        const double seconds = once();
        best = std::min(best, seconds);
        spent += seconds;
    }
    return best;
}

void time_all(std::vector<Case> (*family)(), std::string_view part) {
    for (const Case& c : family()) {
        if (c.name.find(part) == std::string::npos) continue;
        const double seconds = seconds_of(c);
        std::printf("%-64s %10.1f us %8.2f GFLOP/s %8.2f GB/s\n", c.name.c_str(), seconds * 1e6,
                    c.flops / seconds / 1e9, c.bytes / seconds / 1e9);
        std::fflush(stdout);
    }
}

} // namespace

const moe::Kernels& moe::test::table() { return moe::cpu_kernels(); }
moe::test::PackedBytes moe::test::packed(const moe::BlockShape& s, const Tensor& x) { return packed_by_host(s, x); }

int main(int argc, char** argv) {
    std::string why;
    if (!moe::cpu_supported(why)) {
        std::fprintf(stderr, "%s\n", why.c_str());
        return 1;
    }
    if (argc >= 2 && std::string_view(argv[1]) == "bench") {
        using namespace moe::test;
        for (const auto family :
             {gemm_benchmarks, attention_benchmarks, state_benchmarks, norm_benchmarks, rope_benchmarks,
              activation_benchmarks, router_benchmarks, sinkhorn_benchmarks, permute_benchmarks, quantize_benchmarks,
              quantize_columns_benchmarks, round_benchmarks, loss_benchmarks, optimizer_benchmarks, mxfp8_benchmarks}) {
            time_all(family, argc > 2 ? argv[2] : "");
        }
        return 0;
    }
    doctest::Context context(argc, argv);
    return context.run();
}
