// Scores of the router as its kernels and those of its losses take them from logits.
#pragma once

#include "kernels/cuda/device.cuh"

namespace moe::cuda {

inline constexpr float tiny_sum = 1e-20f; // sum that keeps shares and weights finite when every score underflows

__host__ __device__ inline bool limits_groups(const RouterShape& s) { return s.groups > 1 && s.groups_kept < s.groups; }
__host__ __device__ inline bool by_logit(const RouterShape& s, bool biased) {
    return !biased && (!limits_groups(s) || s.group_score_top == 1 || s.groups == s.experts);
}

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }
__device__ inline int lane_id() { return static_cast<int>(threadIdx.x % warp_size); }

} // namespace moe::cuda
