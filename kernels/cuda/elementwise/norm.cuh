// RMSNorm's rows of whole packs, each held by the registers of a block: what forward and backward share.
#pragma once

#include "kernels/cuda/vector.cuh"

namespace moe::cuda {

inline constexpr int norm_threads = 512; // most threads of a block that holds a row

struct Norm {
    Src x, w;
    std::int64_t rows, cols, stride; // stride: elements from row to row of x and of dx
};

// Sums over a block, one after another: two buffers in turn, so that one barrier per sum does.
struct RowSums {
    float part[2][norm_threads / warp_size];
    __device__ float operator()(float value, int parity) {
        const int warps = static_cast<int>(blockDim.x) / warp_size;
        value = warp_sum(value);
        if (threadIdx.x % warp_size == 0) part[parity][threadIdx.x / warp_size] = value;
        __syncthreads();
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < norm_threads / warp_size; ++w) sum += w < warps ? part[parity][w] : 0.0f;
        return sum;
    }
};

// The packs of one operand's row that a thread owns: every blockDim.x-th.
template <class A, int K>
struct Share {
    typename A::Held held[K];
    __device__ void read(Src x, std::int64_t start, int packs) {
#pragma unroll
        for (int k = 0; k < K; ++k) {
            const int p = static_cast<int>(threadIdx.x + k * blockDim.x);
            if (p < packs) held[k] = A::take(x, start + p * A::width);
        }
    }
};
// Calls run(k, first column) for the packs of a row that this thread owns.
template <class A, int K, class Run>
__device__ void for_own_packs(int packs, Run run) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
        const int p = static_cast<int>(threadIdx.x + k * blockDim.x);
        if (p < packs) run(k, p * A::width);
    }
}

// Calls run(K{}, threads) for rows of so many packs; false where no block holds one.
template <class Run>
bool with_share(std::int64_t packs, Run run) {
    const auto threads_of = [packs](std::int64_t k) {
        return static_cast<int>(ceil_div(packs, k * warp_size)) * warp_size;
    };
    if (packs <= 2 * norm_threads) {
        run(std::integral_constant<int, 2>{}, threads_of(2));
    } else if (packs <= 4 * norm_threads) {
        run(std::integral_constant<int, 4>{}, threads_of(4));
    } else {
        return false;
    }
    return true;
}

// The table's entry of that name.
void rmsnorm_grad(Src dy, Src x, Src w, const float* rstd, Src dresidual, Dst dx, float* dw, std::int64_t rows,
                  std::int64_t cols, std::int64_t stride, void* stream);

} // namespace moe::cuda
