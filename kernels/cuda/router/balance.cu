// Balancing of experts: loads by score, the router's losses, the selection bias, experts of one rank.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/router/scores.cuh"

namespace moe::cuda {
namespace {

constexpr int threads = 128, warps = threads / warp_size;
constexpr int sum_threads = 1024, sum_warps = sum_threads / warp_size;

// The values that a warp needs of a token's logits: their largest, the logarithm of the sum of their exponentials, the
// sum of scores.
struct Row {
    std::int64_t start;
    float largest = -INFINITY, lse = 0.0f, sum = 1.0f;
    Score score;
    __device__ Row(const RouterShape& s, Src logits, std::int64_t token) : start(token * s.experts), score(s.score) {
        for (int e = lane_id(); e < s.experts; e += warp_size) largest = fmaxf(largest, load(logits, start + e));
        largest = warp_max(largest);
        float exponentials = 0.0f, scores = 0.0f;
        for (int e = lane_id(); e < s.experts; e += warp_size) {
            const float x = load(logits, start + e);
            exponentials += expf(x - largest);
            if (score != Score::softmax) scores += raw(x);
        }
        exponentials = warp_sum(exponentials);
        lse = largest + logf(exponentials);
        sum = score == Score::softmax ? 1.0f : warp_sum(scores) + tiny_sum;
    }
    __device__ float raw(float x) const { return score == Score::sigmoid ? sigmoid(x) : sqrtf(softplus(x)); }
    // Score of a logit divided by the sum of all; its slope by the logit with that sum held fixed, times the sum.
    __device__ float share(float x) const { return score == Score::softmax ? expf(x - lse) : raw(x) / sum; }
    __device__ float slope(float x) const {
        if (score == Score::softmax) return expf(x - lse);
        const float value = raw(x);
        if (score == Score::sigmoid) return value * (1.0f - value);
        return value > 0.0f ? sigmoid(x) / (2.0f * value) : 0.0f;
    }
};

// One block per sequence and expert: whole numbers, so that the order of adding does not matter. A token holds the
// expert when fewer than top_k others come before it, equal logits by lower number.
__global__ void __launch_bounds__(threads) load_kernel(BalanceShape s, Src logits, float* load_of) {
    const RouterShape& r = s.router;
    const int e = static_cast<int>(blockIdx.x);
    const std::int64_t sequence = blockIdx.y;
    int count = 0;
    for (std::int64_t t = sequence + s.sequences * (threadIdx.x / warp_size); t < r.tokens; t += s.sequences * warps) {
        const std::int64_t start = t * r.experts;
        const float mine = load(logits, start + e);
        int before = 0;
        for (int o = lane_id(); o < r.experts; o += warp_size) {
            const float other = load(logits, start + o);
            before += other > mine || (other == mine && o < e) ? 1 : 0;
        }
        count += warp_sum(before) < r.top_k ? 1 : 0;
    }
    count = block_sum(lane_id() == 0 ? count : 0);
    if (threadIdx.x == 0) load_of[sequence * r.experts + e] = static_cast<float>(count);
}

// One block, in a fixed order: some thousand tokens.
__global__ void __launch_bounds__(sum_threads)
    loss_kernel(BalanceShape s, Src logits, const float* load_of, float* loss) {
    const RouterShape& r = s.router;
    double aux = 0.0, z = 0.0;
    for (std::int64_t t = threadIdx.x / warp_size; t < r.tokens; t += sum_warps) {
        const Row row(r, logits, t);
        float along = 0.0f;
        for (int e = lane_id(); load_of != nullptr && e < r.experts; e += warp_size)
            along += row.share(load(logits, row.start + e)) * load_of[t % s.sequences * r.experts + e];
        along = warp_sum(along);
        aux += static_cast<double>(along);
        z += static_cast<double>(row.lse) * static_cast<double>(row.lse);
    }
    aux = block_sum(lane_id() == 0 ? aux : 0.0);
    z = block_sum(lane_id() == 0 ? z : 0.0);
    if (threadIdx.x != 0) return;
    if (load_of != nullptr) loss[0] += static_cast<float>(s.aux * aux);
    loss[1] += static_cast<float>(s.z * z);
}

__global__ void __launch_bounds__(threads)
    loss_grad_kernel(BalanceShape s, Src logits, const float* load_of, Src dlogits, Dst out) {
    const RouterShape& r = s.router;
    const std::int64_t t = std::int64_t{blockIdx.x} * warps + threadIdx.x / warp_size;
    if (t >= r.tokens) return;
    const Row row(r, logits, t);
    const float* n = load_of + t % s.sequences * r.experts; // The counts are read only where there is a load.
    float along = 0.0f;
    for (int e = lane_id(); load_of != nullptr && e < r.experts; e += warp_size)
        along += row.share(load(logits, row.start + e)) * n[e];
    along = warp_sum(along);
    const auto z = static_cast<float>(2.0 * s.z) * row.lse, aux = static_cast<float>(s.aux);
    for (int e = lane_id(); e < r.experts; e += warp_size) {
        const float x = load(logits, row.start + e);
        float grad = load(dlogits, row.start + e) + z * expf(x - row.lse);
        if (load_of != nullptr) grad += aux * (n[e] - along) / row.sum * row.slope(x);
        store(out, row.start + e, grad);
    }
}

__global__ void __launch_bounds__(threads) add_counts_kernel(const std::int32_t* counts, float* sum, int n) {
    const int i = static_cast<int>(blockIdx.x * threads + threadIdx.x);
    if (i < n) sum[i] += static_cast<float>(counts[i]);
}

__global__ void __launch_bounds__(threads) bias_kernel(ExpertBiasShape s, const float* load_of, const float* overflow,
                                                       const float* squares, const float* hyper, float* master, Dst w) {
    if (overflow != nullptr && *overflow > 0.0f) return;
    if (hyper[8] > 0.0f && !(*squares <= hyper[8])) return;
    float sum = 0.0f; // sum of whole numbers
    for (int e = static_cast<int>(threadIdx.x); e < s.experts; e += threads) sum += load_of[e];
    __shared__ float mean;
    sum = block_sum(sum);
    if (threadIdx.x == 0) mean = sum / static_cast<float>(s.experts);
    __syncthreads();
    for (int e = static_cast<int>(threadIdx.x); e < s.experts; e += threads) {
        const std::int64_t at = s.bias + e - s.offset;
        if (at < 0 || at >= s.elements || load_of[e] == mean) continue;
        master[at] += static_cast<float>(load_of[e] < mean ? s.rate : -s.rate);
        store(w, at, master[at]);
    }
}

__global__ void __launch_bounds__(threads)
    local_kernel(const std::int32_t* index, std::int32_t* to, std::int64_t n, int first, int local) {
    const std::int64_t i = std::int64_t{blockIdx.x} * threads + threadIdx.x;
    if (i < n) to[i] = index[i] >= first && index[i] < first + local ? index[i] - first : -1;
}

void router_load(const BalanceShape& s, Src logits, float* load_of, void* stream) {
    if (s.router.experts <= 0 || s.sequences <= 0) return;
    const dim3 grid(static_cast<unsigned>(s.router.experts), static_cast<unsigned>(s.sequences));
    load_kernel<<<grid, threads, 0, stream_of(stream)>>>(s, logits, load_of);
    CUDA_CHECK(cudaGetLastError());
}

void router_loss(const BalanceShape& s, Src logits, const float* load_of, float* loss, void* stream) {
    loss_kernel<<<1, sum_threads, 0, stream_of(stream)>>>(s, logits, load_of, loss);
    CUDA_CHECK(cudaGetLastError());
}

void router_loss_grad(const BalanceShape& s, Src logits, const float* load_of, Src dlogits, Dst out, void* stream) {
    if (s.router.tokens <= 0) return;
    loss_grad_kernel<<<blocks_for(s.router.tokens, warps), threads, 0, stream_of(stream)>>>(s, logits, load_of, dlogits,
                                                                                            out);
    CUDA_CHECK(cudaGetLastError());
}

void add_counts(const std::int32_t* counts, float* sum, int n, void* stream) {
    if (n <= 0) return;
    add_counts_kernel<<<blocks_for(n, threads), threads, 0, stream_of(stream)>>>(counts, sum, n);
    CUDA_CHECK(cudaGetLastError());
}

void expert_bias(const ExpertBiasShape& s, const float* load_of, const float* overflow, const float* squares,
                 const float* hyper, float* master, Dst w, void* stream) {
    bias_kernel<<<1, threads, 0, stream_of(stream)>>>(s, load_of, overflow, squares, hyper, master, w);
    CUDA_CHECK(cudaGetLastError());
}

void local_experts(const std::int32_t* index, std::int32_t* to, std::int64_t n, int first, int local, void* stream) {
    if (n <= 0) return;
    local_kernel<<<blocks_for(n, threads), threads, 0, stream_of(stream)>>>(index, to, n, first, local);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_balance(Kernels& table) {
    table.router_load = router_load;
    table.router_loss = router_loss;
    table.router_loss_grad = router_loss_grad;
    table.add_counts = add_counts;
    table.expert_bias = expert_bias;
    table.local_experts = local_experts;
}

} // namespace moe::cuda
