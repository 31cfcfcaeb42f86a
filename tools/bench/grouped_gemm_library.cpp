// The grouped products of the CUDA table as a C function, so that a script can time them beside another library's.
#include "kernels/cuda/cuda_kernels.hpp"

#include <cstdint>
#include <cstdio>
#include <exception>

namespace {

// 0, or 1 with a line on stderr.
template <class Call>
int run(Call call) {
    try {
        const moe::Kernels* table = moe::cuda_kernels();
        if (table == nullptr) {
            std::fprintf(stderr, "the CUDA kernels do not run on this machine\n");
            return 1;
        }
        call(*table);
        return 0;
    } catch (const std::exception& problem) {
        std::fprintf(stderr, "%s\n", problem.what());
        return 1;
    }
}

} // namespace

// BF16 operands; C is BF16 where `low` is not 0 and FP32 otherwise.
extern "C" int moe_grouped_gemm(int product, int accumulate, int low, int groups, std::int64_t n, std::int64_t k,
                                std::int64_t capacity, const void* a, const void* b, const std::int32_t* counts,
                                void* c, void* stream) {
    const auto form = static_cast<moe::GroupedProduct>(product);
    const moe::Type result = low != 0 ? moe::Type::bf16 : moe::Type::f32;
    return run([&](const moe::Kernels& table) {
        table.grouped_gemm({form, groups, n, k, capacity, accumulate != 0}, {a, moe::Type::bf16}, {b, moe::Type::bf16},
                           counts, {c, result}, stream);
    });
}

// E4M3 operands with their scales; C is BF16.
extern "C" int moe_scaled_gemm(int groups, std::int64_t n, std::int64_t k, std::int64_t capacity, const std::uint8_t* a,
                               const float* a_scale, const std::uint8_t* b, const float* b_scale,
                               const std::int32_t* counts, void* c, void* stream) {
    return run([&](const moe::Kernels& table) {
        table.scaled_gemm({groups, n, k, capacity}, a, a_scale, b, b_scale, counts, {c, moe::Type::bf16}, stream);
    });
}

// Columns of BF16 rows in E4M3, and, where [q] is given, the rows beside them.
extern "C" int moe_quantize_columns(int groups, std::int64_t rows, std::int64_t cols, const void* x,
                                    const std::int32_t* counts, std::uint8_t* q, float* q_scale, std::uint8_t* columns,
                                    float* scale, void* stream) {
    return run([&](const moe::Kernels& table) {
        table.quantize_columns({rows, cols, groups}, {x, moe::Type::bf16}, counts, {q, q_scale}, {columns, scale},
                               stream);
    });
}

// The gradient of weights in FP32 from columns of E4M3.
extern "C" int moe_scaled_wgrad(int accumulate, int groups, std::int64_t n, std::int64_t k, std::int64_t capacity,
                                std::uint8_t* a, float* a_scale, std::uint8_t* b, float* b_scale,
                                const std::int32_t* counts, void* c, void* stream) {
    return run([&](const moe::Kernels& table) {
        table.scaled_wgrad({groups, n, k, capacity, accumulate != 0}, {a, a_scale}, {b, b_scale}, counts,
                           {c, moe::Type::f32}, stream);
    });
}
