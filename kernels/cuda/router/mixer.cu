// The sparse mixer: a warp for each token picks its experts one after another.
#include "kernels/cuda/router/mixer.hpp"

#include "kernels/cuda/router/scores.cuh"

namespace moe::cuda {
namespace {

constexpr int threads = 128, warps = threads / warp_size;

// A token's logits and what has been chosen of them; every lane goes over its own experts.
struct Token {
    const RouterShape& s;
    Src logits;
    std::int64_t start;
    const std::int32_t* chosen; // so far

    __device__ float logit(int e) const { return load(logits, start + e); }
    __device__ bool taken(int e, int k) const {
        for (int i = 0; i < k; ++i)
            if (chosen[i] == e) return true;
        return false;
    }
    // The largest logit of those left, of equal ones the first.
    __device__ int best(int k) const {
        float most = -INFINITY;
        int at = s.experts;
        for (int e = lane_id(); e < s.experts; e += warp_size) {
            if (taken(e, k)) continue;
            if (at == s.experts || logit(e) > most) most = logit(e), at = e;
        }
        for (int offset = warp_size / 2; offset > 0; offset /= 2) {
            const float value = __shfl_xor_sync(all_lanes, most, offset);
            const int other = __shfl_xor_sync(all_lanes, at, offset);
            if (other < s.experts && (at == s.experts || value > most || (value == most && other < at)))
                most = value, at = other;
        }
        return __shfl_sync(all_lanes, at < s.experts ? at : 0, 0);
    }
    // The share of an expert before it is divided by the sum of all.
    __device__ float share(int e, int k, float most) const {
        const float x = logit(e), far = (most - x) / fmaxf(fabsf(x), most);
        return taken(e, k) || far > 2.0f * static_cast<float>(s.mixer) ? 0.0f : expf(x - most);
    }
    __device__ float sum(int k, float most) const {
        float all = 0.0f;
        for (int e = lane_id(); e < s.experts; e += warp_size) all += share(e, k, most);
        return warp_sum(all);
    }
};

__global__ void __launch_bounds__(threads)
    mixer_kernel(RouterShape s, Src logits, GivenChoice given, std::int32_t* index, float* weight) {
    const std::int64_t token = std::int64_t{blockIdx.x} * warps + threadIdx.x / warp_size;
    if (token >= s.tokens) return;
    std::int32_t* const chosen = index + token * s.top_k;
    const Token t{s, logits, token * s.experts, chosen};
    const int forced = given.positions != nullptr ? given.positions[(s.first + token) / s.batch] : 0;
    for (int k = 0; k < s.top_k; ++k) {
        const int best = given.recorded != nullptr    ? given.recorded[token * s.top_k + k]
                         : given.positions != nullptr ? (forced + k * (s.experts / s.top_k)) % s.experts
                                                      : t.best(k);
        const float sum = t.sum(k, t.logit(best));
        if (lane_id() == 0) {
            chosen[k] = best;
            weight[token * s.top_k + k] = static_cast<float>(s.scale) / sum;
        }
        __syncwarp();
    }
}

__global__ void __launch_bounds__(threads)
    mixer_grad_kernel(RouterShape s, const float* dweight, Src logits, const std::int32_t* index, Dst dlogits) {
    const std::int64_t token = std::int64_t{blockIdx.x} * warps + threadIdx.x / warp_size;
    if (token >= s.tokens) return;
    const std::int32_t* const chosen = index + token * s.top_k;
    const Token t{s, logits, token * s.experts, chosen};
    for (int first = 0; first < s.experts; first += warp_size) { // All lanes sum, whether they have an expert or not.
        const int e = first + lane_id();
        float grad = 0.0f;
        for (int k = 0; k < s.top_k; ++k) {
            const float most = t.logit(chosen[k]), sum = t.sum(k, most);
            const float dw = dweight[token * s.top_k + k] * static_cast<float>(s.scale) / sum;
            if (e < s.experts) grad += dw * ((e == chosen[k] ? 1.0f : 0.0f) - t.share(e, k, most) / sum);
        }
        if (e < s.experts) store(dlogits, t.start + e, grad);
        __syncwarp();
    }
}

} // namespace

void mixer(const RouterShape& s, Src logits, GivenChoice given, std::int32_t* index, float* weight, void* stream) {
    if (s.tokens <= 0) return;
    mixer_kernel<<<blocks_for(s.tokens, warps), threads, 0, stream_of(stream)>>>(s, logits, given, index, weight);
    CUDA_CHECK(cudaGetLastError());
}

void mixer_grad(const RouterShape& s, const float* dweight, Src logits, const std::int32_t* index, Dst dlogits,
                void* stream) {
    if (s.tokens <= 0) return;
    mixer_grad_kernel<<<blocks_for(s.tokens, warps), threads, 0, stream_of(stream)>>>(s, dweight, logits, index,
                                                                                      dlogits);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace moe::cuda
