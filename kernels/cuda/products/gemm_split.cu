// Products of an FP32 operand and a BF16 one, such as those of a router's gradient: the first as two of BF16.
//
// The rest of an FP32 number beyond BF16 is again nearly a BF16 number: of both together 2^-18 of it are missing at
// most, 7e-7 on average, less than what FP32 sums of some thousand products lose. The rest is multiplied first, so that
// a result in BF16, which the second product adds to, has lost no more than 2^-18 of itself in between.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/products/product.cuh"
#include "kernels/cuda/scratch.hpp"

#include <stdexcept>

namespace moe::cuda {
namespace {

constexpr int threads = 256;
constexpr double least_products = 1 << 22; // least size: below, three launches take more than they save

// rows of `cols` FP32 numbers -> rows of 2 cols: theirs in BF16, and what that leaves of them.
__global__ void __launch_bounds__(threads)
    split_kernel(const float* x, std::int64_t stride, std::int64_t rows, std::int64_t cols, __nv_bfloat16* to) {
    const std::int64_t i = std::int64_t{blockIdx.x} * threads + threadIdx.x, row = i / cols, col = i % cols;
    if (row >= rows) return;
    const float value = x[row * stride + col];
    const __nv_bfloat16 high = __float2bfloat16_rn(value);
    const float wide = __bfloat162float(high);
    to[row * 2 * cols + col] = high;
    to[(row * 2 + 1) * cols + col] = __float2bfloat16_rn(isfinite(wide) ? value - wide : 0.0f);
}

} // namespace

bool split_gemm(const Product& p, cudaStream_t stream) {
    if (p.a.type != Type::f32 || p.b.type != Type::bf16 || p.k <= 0) return false;
    if (static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k) < least_products) return false;
    const std::int64_t rows = p.transpose_a ? p.k : p.m, cols = p.transpose_a ? p.m : p.k; // shape of A as it lies
    const std::int64_t at_once = scratch_floats / cols / 32 * 32; // Two BF16 numbers take the room of one FP32 number.
    if (at_once <= 0) return false;
    auto* const parts = reinterpret_cast<__nv_bfloat16*>(scratch_of(stream));
    for (std::int64_t row = 0; row < rows; row += at_once) {
        const std::int64_t some = at_once < rows - row ? at_once : rows - row;
        split_kernel<<<blocks_for(some * cols, threads), threads, 0, stream>>>(
            static_cast<const float*>(p.a.data) + row * p.lda, p.lda, some, cols, parts);
        CUDA_CHECK(cudaGetLastError());
        Product part = p;
        part.lda = 2 * cols;
        if (p.transpose_a) {
            part.k = some;
            part.b = p.b + row * (p.transpose_b ? 1 : p.ldb);
            part.accumulate = p.accumulate || row > 0;
        } else {
            part.m = some;
            part.c = p.c + row * p.ldc;
        }
        for (const bool high : {false, true}) {
            part.a = {parts + (high ? 0 : cols), Type::bf16};
            if (!library_gemm(part, stream)) {
                if (row == 0 && !high) return false;
                throw std::runtime_error("a product in parts: the library takes one of them and not the next");
            }
            part.accumulate = true;
        }
    }
    return true;
}

} // namespace moe::cuda
