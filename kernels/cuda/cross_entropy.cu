// Cross-entropy and its gradient with a cluster of CTAs per row: the logits are read once and stay in registers until
// the gradient takes their place. Clusters step through rows; the next one comes to shared memory meanwhile.
#include "kernels/cuda/cross_entropy.hpp"

#include "kernels/cuda/ptx/barrier.cuh"
#include "kernels/cuda/ptx/tma.cuh"
#include "kernels/cuda/vector.cuh"

#include <algorithm>
#include <atomic>

namespace moe::cuda {
namespace {

constexpr int threads = 512;
constexpr int most_ctas = 8; // of a cluster, what every device of compute capability 9.0 or later can place

// Own exponentials of a difference to the largest logit: the fast one is exact enough, the other takes longer than the
// memory.
__device__ float exponential(float x) { return __expf(x); }

// Elements that are no real vocabulary entries count as minus infinity.
template <class T, int W>
__device__ void hide(Pack<T, W>& held, int from) {
#pragma unroll
    for (int j = 0; j < W; ++j) {
        if (j < from) continue;
        if constexpr (sizeof(T) == 4) {
            held.word[j] = 0xff800000u;
        } else {
            unsigned& word = held.word[j / 2];
            word = j % 2 == 0 ? (word & 0xffff0000u) | 0x0000ff80u : (word & 0x0000ffffu) | 0xff800000u;
        }
    }
}

// The slice of a row that a CTA holds: P packs in every thread, those that it has not all minus infinity.
template <class A, int P>
struct Slice {
    static constexpr int W = A::width;
    typename A::Held held[P];
    std::int64_t start; // of the row
    int begin, end;     // packs of the row
    __device__ Slice(const LossShape& s, int part, int parts) : start(0) {
        const int packs = static_cast<int>(s.vocab_local / W), each = (packs + parts - 1) / parts;
        begin = part * each < packs ? part * each : packs;
        end = begin + each < packs ? begin + each : packs;
    }
    // Of a row, to shared memory; one thread calls.
    __device__ void fetch(const LossShape& s, std::int64_t row, Src logits, const void* to, unsigned barrier) const {
        const unsigned bytes = static_cast<unsigned>(end - begin) * 16;
        ptx::arrive_expecting(barrier, bytes);
        const auto* const from = static_cast<const typename A::Storage*>(logits.data) + row * s.vocab_local + begin * W;
        if (bytes > 0) ptx::load_bytes(ptx::shared_address(to), from, bytes, barrier);
    }
    __device__ int column(int p) const { return (begin + static_cast<int>(threadIdx.x) + p * threads) * W; }
    __device__ bool has(int p) const { return begin + static_cast<int>(threadIdx.x) + p * threads < end; }
    __device__ void read(const LossShape& s, std::int64_t row, const typename A::Held* arrived) {
        start = row * s.vocab_local;
#pragma unroll
        for (int p = 0; p < P; ++p) {
            if (has(p)) held[p] = arrived[threadIdx.x + p * threads];
        }
        const auto columns = static_cast<int>(s.vocab);
#pragma unroll
        for (int p = 0; p < P; ++p) {
            const int real = has(p) ? columns - column(p) : 0;
            if (real < W) hide(held[p], real);
        }
    }
    __device__ float largest() const {
        float best = -INFINITY;
#pragma unroll
        for (int p = 0; p < P; ++p) {
#pragma unroll
            for (int j = 0; j < W; ++j) best = fmaxf(best, held[p][j]);
        }
        return block_max(best);
    }
    // Of the exponentials of what lies above `base`.
    __device__ float sum(float base) const {
        float total = 0.0f;
#pragma unroll
        for (int p = 0; p < P; ++p) {
#pragma unroll
            for (int j = 0; j < W; ++j) total += exponential(held[p][j] - base);
        }
        return block_sum(total);
    }
};

// Largest logit and sum of exponentials over the row from those of the cluster's CTAs, in their order.
struct RowStat {
    float largest, sum;
    __device__ RowStat(const float2* own, int parts) : largest(-INFINITY), sum(0.0f) {
        const unsigned address = ptx::shared_address(own);
        float2 of_part[most_ctas];
#pragma unroll
        for (int part = 0; part < most_ctas; ++part) {
            if (part < parts) of_part[part] = ptx::read_remote(ptx::in_cta(address, static_cast<unsigned>(part)));
            if (part < parts) largest = fmaxf(largest, of_part[part].x);
        }
#pragma unroll
        for (int part = 0; part < most_ctas; ++part) {
            if (part < parts) sum += of_part[part].y * exponential(of_part[part].x - largest);
        }
    }
};

// Blocks of a multiprocessor, as registers allow for so many packs.
template <int P>
constexpr int resident = P > 5 ? 1 : 2;

template <class A, int P>
__global__ void __launch_bounds__(threads, resident<P>)
    cross_entropy_kernel(LossShape s, float gradient_scale, Src logits, const std::int32_t* labels, float* max,
                         float* stat, Dst dlogits) {
    constexpr int W = A::width;
    extern __shared__ __align__(128) uint4 arriving[]; // a slice
    __shared__ float2 own;
    __shared__ std::uint64_t barrier_memory;
    const unsigned barrier = ptx::shared_address(&barrier_memory);
    const int part = static_cast<int>(ptx::cluster_rank()), parts = static_cast<int>(ptx::cluster_ctas());
    const std::int64_t clusters = gridDim.x / parts;
    Slice<A, P> slice(s, part, parts);
    if (threadIdx.x == 0) {
        ptx::init_barrier(barrier, 1);
        ptx::fence_barrier_init();
        slice.fetch(s, blockIdx.x / parts, logits, arriving, barrier);
    }
    __syncthreads();
    unsigned parity = 0;
    for (std::int64_t row = blockIdx.x / parts; row < s.rows; row += clusters, parity ^= 1) {
        const int label = labels[row];
        ptx::wait(barrier, parity);
        slice.read(s, row, reinterpret_cast<const typename A::Held*>(arriving));
        const float best = slice.largest(), base = best == -INFINITY ? 0.0f : best; // all have read what arrived
        if (threadIdx.x == 0 && row + clusters < s.rows) slice.fetch(s, row + clusters, logits, arriving, barrier);
        const float sum = slice.sum(base);
        if (threadIdx.x == 0) own = float2{base, sum};
        ptx::cluster_sync();
        const RowStat all(&own, parts);
        ptx::cluster_arrive(); // `own` has been read
        const bool counts = label >= 0 && label < s.vocab;
        if (part == 0 && threadIdx.x == 0) {
            max[row] = all.largest;
            stat[2 * row] = label < 0 ? 0.0f : all.sum;
            if (!counts) stat[2 * row + 1] = 0.0f;
        }
        const float factor = label < 0 ? 0.0f : gradient_scale / all.sum;
#pragma unroll
        for (int p = 0; p < P; ++p) {
            if (!slice.has(p)) break;
            const int c = slice.column(p);
            float value[W];
#pragma unroll
            for (int j = 0; j < W; ++j) value[j] = exponential(slice.held[p][j] - all.largest) * factor;
            if (counts && label >= c && label < c + W) {
#pragma unroll
                for (int j = 0; j < W; ++j) {
                    if (c + j != label) continue;
                    stat[2 * row + 1] = slice.held[p][j];
                    value[j] -= gradient_scale;
                }
            }
            A::put(dlogits, slice.start + c, value);
        }
        ptx::cluster_wait();
    }
}

template <class A, int P>
void launch(int ctas, const LossShape& s, float gradient_scale, Src logits, const std::int32_t* labels, float* max,
            float* stat, Dst dlogits, void* stream) {
    constexpr auto kernel = cross_entropy_kernel<A, P>;
    constexpr int shared = P * threads * 16;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(ctas);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(ctas);
    config.blockDim = threads;
    config.dynamicSmemBytes = shared;
    config.stream = stream_of(stream);
    config.attrs = &cluster;
    config.numAttrs = 1;
    static std::atomic<int> known[most_ctas + 1]; // clusters that the device holds; asking costs more than a launch
    if (known[ctas] == 0) {
        int found = 0;
        CUDA_CHECK(cudaOccupancyMaxActiveClusters(&found, kernel, &config));
        known[ctas] = std::max(found, 1);
    }
    config.gridDim = static_cast<unsigned>(std::min<std::int64_t>(s.rows, known[ctas])) * static_cast<unsigned>(ctas);
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, s, gradient_scale, logits, labels, max, stat, dlogits));
}

} // namespace

bool cross_entropy_rows(const LossShape& s, double gradient_scale, Src logits, const std::int32_t* labels, float* max,
                        float* stat, Dst dlogits, void* stream) {
    if (s.rows <= 0) return true;
    bool done = false;
    with_access({logits, dlogits}, {s.vocab_local}, [&](auto access) {
        using A = decltype(access);
        if constexpr (A::width > 1) {
            const auto run = [&](auto packs) {
                for (int ctas = 1; ctas <= most_ctas && !done; ctas *= 2) {
                    if (s.vocab_local > std::int64_t{ctas} * threads * packs() * A::width) continue;
                    done = true;
                    launch<A, packs()>(ctas, s, static_cast<float>(gradient_scale), logits, labels, max, stat, dlogits,
                                       stream);
                }
            };
            run(std::integral_constant<int, 5>{});
            if (!done) run(std::integral_constant<int, 10>{});
        }
    });
    return done;
}

} // namespace moe::cuda
