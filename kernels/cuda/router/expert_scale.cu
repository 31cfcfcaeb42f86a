// A factor of every expert on its routing weights (Gemma 4), and its gradient.
#include "kernels/cuda/families.hpp"

#include "kernels/cuda/device.cuh"

namespace moe::cuda {
namespace {

constexpr int threads = 256;

__global__ void __launch_bounds__(threads)
    scale_kernel(const float* weight, const std::int32_t* index, Src s, float* scaled, std::int64_t n) {
    const std::int64_t i = std::int64_t{blockIdx.x} * threads + threadIdx.x;
    if (i < n) scaled[i] = index[i] < 0 ? 0.0f : weight[i] * load(s, index[i]);
}

// A block for each expert goes over all copies, so that its sum has one order.
__global__ void __launch_bounds__(threads) factor_grad_kernel(const float* dscaled, const float* weight,
                                                              const std::int32_t* index, float* ds, std::int64_t n) {
    const int expert = static_cast<int>(blockIdx.x);
    float sum = 0.0f;
    for (std::int64_t i = threadIdx.x; i < n; i += threads)
        if (index[i] == expert) sum += dscaled[i] * weight[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) ds[expert] += sum;
}

void expert_scale(const float* weight, const std::int32_t* index, Src s, float* scaled, std::int64_t n, int,
                  void* stream) {
    if (n <= 0) return;
    scale_kernel<<<blocks_for(n, threads), threads, 0, stream_of(stream)>>>(weight, index, s, scaled, n);
    CUDA_CHECK(cudaGetLastError());
}

// The factors' gradient is first: dweight may replace dscaled.
void expert_scale_grad(const float* dscaled, const float* weight, const std::int32_t* index, Src s, float* dweight,
                       float* ds, std::int64_t n, int experts, void* stream) {
    if (n <= 0) return;
    factor_grad_kernel<<<static_cast<unsigned>(experts), threads, 0, stream_of(stream)>>>(dscaled, weight, index, ds,
                                                                                          n);
    CUDA_CHECK(cudaGetLastError());
    expert_scale(dscaled, index, s, dweight, n, experts, stream);
}

} // namespace

void add_expert_scale(Kernels& table) {
    table.expert_scale = expert_scale;
    table.expert_scale_grad = expert_scale_grad;
}

} // namespace moe::cuda
