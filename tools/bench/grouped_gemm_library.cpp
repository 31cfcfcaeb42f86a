// The grouped products of the CUDA table as a C function, so that a script can time them beside another library's.
#include "kernels/cuda/cuda_kernels.hpp"

#include <cstdint>
#include <cstdio>
#include <exception>

// BF16 operands; C is FP32 for wgrad and BF16 otherwise. 0, or 1 with a line on stderr.
extern "C" int moe_grouped_gemm(int product, int groups, std::int64_t n, std::int64_t k, std::int64_t capacity,
                                const void* a, const void* b, const std::int32_t* counts, void* c, void* stream) {
    try {
        const moe::Kernels* table = moe::cuda_kernels();
        if (table == nullptr) {
            std::fprintf(stderr, "the CUDA kernels do not run on this machine\n");
            return 1;
        }
        const auto form = static_cast<moe::GroupedProduct>(product);
        const moe::Type result = form == moe::GroupedProduct::wgrad ? moe::Type::f32 : moe::Type::bf16;
        table->grouped_gemm({form, groups, n, k, capacity}, {a, moe::Type::bf16}, {b, moe::Type::bf16}, counts,
                            {c, result}, stream);
        return 0;
    } catch (const std::exception& problem) {
        std::fprintf(stderr, "%s\n", problem.what());
        return 1;
    }
}
