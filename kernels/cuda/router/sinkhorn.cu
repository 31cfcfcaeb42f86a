// Experts chosen behind Sinkhorn's iteration over all tokens of a call: one cluster of CTAs goes on until the factors
// of the experts settle, which the host need not know.
//
// A warp has every so manieth token, a lane every 32nd expert. The sums over tokens are added up in one order, warp by
// warp and CTA by CTA, and every CTA makes the same factors of them: all see the same change, and end together.
#include "kernels/cuda/families.hpp"

#include "kernels/cuda/check.hpp"
#include "kernels/cuda/ptx/barrier.cuh"
#include "kernels/cuda/router/router_choice.cuh"

#include <cmath>

namespace moe::cuda {
namespace {

constexpr int ctas = 8; // blocks of a cluster that every device of compute capability 9.0 or later can place
constexpr int threads = 512, warps = threads / warp_size;
constexpr int most_experts = 1024; // 32 of a lane

// Floats of shared memory by expert: sums of each warp, those of the CTA by turns in two places, factors.
constexpr int shared_floats = warps + 3;

// The exponentials of a token relative to its largest, 0 where a lane has no expert.
template <int N>
__device__ void exponentials(const SinkhornShape& s, Src logits, std::int64_t token, int lane, float (&c)[N]) {
    float largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int e = lane + i * warp_size;
        c[i] = e < s.experts ? load(logits, token * s.experts + e) : -INFINITY;
        largest = fmaxf(largest, c[i]);
    }
    largest = warp_max(largest);
#pragma unroll
    for (int i = 0; i < N; ++i) c[i] = lane + i * warp_size < s.experts ? __expf(c[i] - largest) : 0.0f;
}

// The best experts of a token, equal ones by lower index; whatever its numbers are, different ones.
template <int N>
__device__ void choose(const SinkhornShape& s, int lane, const float (&value)[N], std::int32_t* index) {
    unsigned gone = 0; // experts of this lane that are chosen
    for (int k = 0; k < s.top_k; ++k) {
        unsigned long long best = 0;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int e = lane + i * warp_size;
            const auto order = static_cast<unsigned long long>(order_of(value[i])) << 32 | (most_experts - e);
            if (e < s.experts && (gone >> i & 1u) == 0 && order > best) best = order;
        }
        for (int offset = warp_size / 2; offset > 0; offset /= 2) {
            const unsigned long long other = __shfl_xor_sync(all_lanes, best, offset);
            best = other > best ? other : best;
        }
        const int e = most_experts - static_cast<int>(best & 0xffffffffu);
        if (e % warp_size == lane) gone |= 1u << e / warp_size;
        if (lane == 0) index[k] = e;
    }
}

template <int N>
__global__ void __launch_bounds__(threads) sinkhorn_kernel(SinkhornShape s, Src logits, std::int32_t* index) {
    extern __shared__ float shared[];
    float* const sums = shared + warps * s.experts; // [2][experts]
    float* const factor = sums + 2 * s.experts;     // [experts]
    const int lane = static_cast<int>(threadIdx.x % warp_size), warp = static_cast<int>(threadIdx.x / warp_size);
    const std::int64_t first = std::int64_t{blockIdx.x} * warps + warp;
    constexpr auto tiny = static_cast<float>(SinkhornShape::tiny);
    for (int e = static_cast<int>(threadIdx.x); e < s.experts; e += threads) factor[e] = 1.0f;
    __syncthreads();
    float c[N], d[N];
    double change = 2.0 * SinkhornShape::tolerance;
    for (int round = 0; round < SinkhornShape::most && change > SinkhornShape::tolerance; ++round) {
        float sum[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            sum[i] = 0.0f;
            d[i] = lane + i * warp_size < s.experts ? factor[lane + i * warp_size] : 0.0f;
        }
        for (std::int64_t t = first; t < s.tokens; t += ctas * warps) {
            exponentials(s, logits, t, lane, c);
            float along = 0.0f;
#pragma unroll
            for (int i = 0; i < N; ++i) along += d[i] * c[i];
            const float a = 1.0f / (static_cast<float>(s.tokens) * (warp_sum(along) + tiny));
#pragma unroll
            for (int i = 0; i < N; ++i) sum[i] += a * c[i];
        }
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (lane + i * warp_size < s.experts) shared[warp * s.experts + lane + i * warp_size] = sum[i];
        __syncthreads();
        float* const mine = sums + round % 2 * s.experts; // The other CTAs may still read those of the round before.
        for (int e = static_cast<int>(threadIdx.x); e < s.experts; e += threads) {
            float of_cta = 0.0f;
            for (int w = 0; w < warps; ++w) of_cta += shared[w * s.experts + e];
            mine[e] = of_cta;
        }
        ptx::cluster_sync();
        double moved = 0.0;
        for (int e = static_cast<int>(threadIdx.x); e < s.experts; e += threads) {
            float all = 0.0f;
            for (unsigned rank = 0; rank < ctas; ++rank)
                all += ptx::read_remote_float(ptx::in_cta(ptx::shared_address(mine + e), rank));
            const float next = 1.0f / (static_cast<float>(s.experts) * (all + tiny));
            moved += fabs(static_cast<double>(next) - static_cast<double>(factor[e]));
            factor[e] = next;
        }
        change = block_sum(moved) / s.experts;
        __syncthreads();
    }
    ptx::cluster_sync(); // The other CTAs may still read this one's sums.
#pragma unroll
    for (int i = 0; i < N; ++i) d[i] = lane + i * warp_size < s.experts ? factor[lane + i * warp_size] : 0.0f;
    for (std::int64_t t = first; t < s.tokens; t += ctas * warps) {
        exponentials(s, logits, t, lane, c);
#pragma unroll
        for (int i = 0; i < N; ++i) c[i] *= d[i];
        choose(s, lane, c, index + t * s.top_k);
    }
}

template <int N>
void launch(const SinkhornShape& s, Src logits, std::int32_t* index, void* stream) {
    constexpr auto kernel = sinkhorn_kernel<N>;
    const int shared = shared_floats * s.experts * static_cast<int>(sizeof(float));
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    shared_floats * N * warp_size * static_cast<int>(sizeof(float))));
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = ctas;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = ctas;
    config.blockDim = threads;
    config.dynamicSmemBytes = static_cast<std::size_t>(shared);
    config.stream = stream_of(stream);
    config.attrs = &cluster;
    config.numAttrs = 1;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, s, logits, index));
}

void sinkhorn(const SinkhornShape& s, Src logits, std::int32_t* index, void* stream) {
    if (s.tokens <= 0) return;
    require(s.experts <= most_experts, "the number of experts of sinkhorn", s.experts, most_experts);
    if (s.experts <= 4 * warp_size)
        launch<4>(s, logits, index, stream);
    else if (s.experts <= 8 * warp_size)
        launch<8>(s, logits, index, stream);
    else
        launch<32>(s, logits, index, stream);
}

} // namespace

void add_sinkhorn(Kernels& table) { table.sinkhorn = sinkhorn; }

} // namespace moe::cuda
