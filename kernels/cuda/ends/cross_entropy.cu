// Cross-entropy and its gradient with a cluster of CTAs per row: the logits are read once, and their exponentials stay
// in registers until the gradient takes their place. Clusters step through rows; the next one comes to shared memory
// meanwhile.
//
// Waiting is what a row costs beside its bytes, so that nothing in a CTA waits for all of its warps: each thread's
// exponentials are relative to its own largest logit, a warp sends its largest and its sum to all CTAs of the cluster,
// and every warp adds up what all warps have sent.
#include "kernels/cuda/ends/cross_entropy.hpp"

#include "kernels/cuda/ptx/barrier.cuh"
#include "kernels/cuda/ptx/tma.cuh"
#include "kernels/cuda/vector.cuh"

#include <algorithm>
#include <atomic>

namespace moe::cuda {
namespace {

constexpr int threads = 512, warps = threads / warp_size;
constexpr int most_ctas = 8; // blocks of a cluster that every device of compute capability 9.0 or later can place
constexpr float log2_e = 1.4426950408889634f, lowest = -1e30f; // lowest: least value that counts as a largest logit

__device__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The largest of some logits and the sum of 2^(log2_e x - base) over them. The base is a rounded product like any
// other: what counts is that all use the same one, so that an exponential is one rounding away from its power.
struct Stat {
    float largest, sum;
    __device__ float base() const { return __fmul_rn(largest, log2_e); }
    // The largest and the sum of all that the lanes of a warp have.
    __device__ static Stat of_warp(Stat own) {
        Stat all{warp_max(own.largest), 0.0f};
        all.sum = warp_sum(own.sum * power_of_2(own.base() - all.base()));
        return all;
    }
    // The sum of the exponentials of differences to the largest logit itself.
    __device__ float true_sum() const { return sum * power_of_2(-__fmaf_rn(largest, log2_e, -base())); }
};

// The values that the warps of a cluster's CTAs tell each other, by turns in two places: who sends for the row after
// next has heard of the next one from all, and these have read before they sent.
struct Exchange {
    struct Place {
        float2 of_warp[most_ctas * warps];
        std::uint64_t barrier;
    };
    Place places[2];

    __device__ void init(int parts) { // One thread calls it.
        for (Place& place : places) {
            ptx::init_barrier(ptx::shared_address(&place.barrier), parts == 1 ? threads : 1);
            expect(place, parts);
        }
    }
    __device__ static void expect(Place& place, int parts) {
        if (parts > 1) ptx::arrive_expecting(ptx::shared_address(&place.barrier), parts * warps * sizeof(float2));
    }
    // A lone CTA writes and arrives: memcheck takes what is sent within a cluster of one for an invalid write.
    __device__ void send(int round, int part, int parts, Stat own) {
        const unsigned lane = threadIdx.x % warp_size;
        Place& place = places[round % 2];
        float2& from = place.of_warp[part * warps + threadIdx.x / warp_size];
        const unsigned barrier = ptx::shared_address(&place.barrier);
        if (parts == 1) {
            if (lane == 0) from = {own.largest, own.sum};
            ptx::arrive(barrier);
        } else if (lane < static_cast<unsigned>(parts)) {
            ptx::send(ptx::in_cta(ptx::shared_address(&from), lane), {own.largest, own.sum},
                      ptx::in_cta(barrier, lane));
        }
    }
    __device__ Stat receive(int round, int parts) {
        Place& place = places[round % 2];
        ptx::wait(ptx::shared_address(&place.barrier), round / 2 % 2);
        if (threadIdx.x == 0) expect(place, parts); // The barrier expects the parts of the round after next.
        const int count = parts * warps, lane = static_cast<int>(threadIdx.x % warp_size);
        constexpr int most = most_ctas * warps;
        Stat own{lowest, 0.0f};
#pragma unroll
        for (int i = 0; i < most; i += warp_size) {
            if (i + lane < count) own.largest = fmaxf(own.largest, place.of_warp[i + lane].x);
        }
#pragma unroll
        for (int i = 0; i < most; i += warp_size) {
            if (i + lane >= count) continue;
            const Stat sent{place.of_warp[i + lane].x, place.of_warp[i + lane].y};
            own.sum += sent.sum * power_of_2(sent.base() - own.base());
        }
        return Stat::of_warp(own);
    }
};

// The slice of a row that a CTA holds: P packs in every thread, which come to shared memory as soon as all threads have
// read those of the row before. Those that the thread does not have, and elements that are no real vocabulary entries,
// are minus infinity there.
template <class A, int P>
struct Slice {
    static constexpr int W = A::width, packs = P * threads, bytes = packs * 16;
    using Held = typename A::Held;
    struct Arrival {
        std::uint64_t arrived, taken; // barriers with a phase per round
        int asked;                    // last round whose row was asked for
    };
    Held* const memory;
    Arrival& arrival;
    int begin, end, real,
        odd; // packs of the row; its first without real elements; elements of the one before, if not W

    __device__ Slice(const LossShape& s, int part, int parts, void* arriving, Arrival& shared)
        : memory(static_cast<Held*>(arriving)), arrival(shared) {
        const int row = static_cast<int>(s.vocab_local / W), each = (row + parts - 1) / parts;
        const int vocab = static_cast<int>(s.vocab), real_packs = ceil_div(vocab, W);
        begin = part * each < row ? part * each : row;
        end = begin + each < row ? begin + each : row;
        real = real_packs < begin ? begin : real_packs < end ? real_packs : end;
        odd = real == real_packs && real > begin ? vocab % W : 0;
        for (int i = static_cast<int>(threadIdx.x); i < packs; i += threads) {
            if (begin + i >= real) hide(memory[i], 0);
        }
        if (threadIdx.x != 0) return;
        ptx::init_barrier(ptx::shared_address(&arrival.arrived), 1);
        ptx::init_barrier(ptx::shared_address(&arrival.taken), threads);
        arrival.asked = 0;
    }
    // Fetches the logits of a row, if there is one; one thread calls.
    __device__ void fetch(const LossShape& s, std::int64_t row, Src logits) const {
        if (row >= s.rows) return;
        const unsigned size = static_cast<unsigned>(real - begin) * 16;
        const unsigned arrived = ptx::shared_address(&arrival.arrived);
        ptx::arrive_expecting(arrived, size);
        const auto* const from = static_cast<const typename A::Storage*>(logits.data) + row * s.vocab_local + begin * W;
        if (size > 0) ptx::load_bytes(ptx::shared_address(memory), from, size, arrived);
    }
    // The next row, once all warps have read this round's: one of those that find it so asks, and the last one does. A
    // warp that waited for the others would keep its own exponentials waiting.
    __device__ void replace(const LossShape& s, std::int64_t row, Src logits, int round) const {
        __syncwarp();
        if (threadIdx.x % warp_size == 0 && ptx::complete(ptx::shared_address(&arrival.taken), round % 2) &&
            atomicCAS(&arrival.asked, round, round + 1) == round)
            fetch(s, row, logits);
    }
    // The thread's elements, and the one of `column` if it is among them.
    __device__ void read(int round, float (&value)[P][W], int column, float& of_column) const {
        ptx::wait(ptx::shared_address(&arrival.arrived), round % 2);
        if (odd != 0 && owns((real - 1) * W)) {
            hide(memory[real - 1 - begin], odd);
            ptx::fence_async_proxy();
        }
#pragma unroll
        for (int p = 0; p < P; ++p) {
            const Held held = memory[threadIdx.x + p * threads];
#pragma unroll
            for (int j = 0; j < W; ++j) value[p][j] = held[j];
        }
        if (owns(column)) {
            const Src row{memory, sizeof(typename A::Storage) == 4 ? Type::f32 : Type::bf16};
            of_column = load(row, column - std::int64_t{begin} * W);
        }
        ptx::arrive(ptx::shared_address(&arrival.taken));
    }
    __device__ int pack(int p) const { return begin + static_cast<int>(threadIdx.x) + p * threads; }
    __device__ bool has(int p) const { return pack(p) < end; }
    // True where this thread holds a column.
    __device__ bool owns(int column) const {
        const int at = column / W - begin;
        return column >= 0 && at >= 0 && at < end - begin && at % threads == static_cast<int>(threadIdx.x);
    }

private:
    __device__ static void hide(Held& held, int from) {
        float value[W];
#pragma unroll
        for (int j = 0; j < W; ++j) value[j] = j < from ? held[j] : -INFINITY;
        held = A::pack(value);
    }
};

// Blocks of a multiprocessor, as registers allow for so many elements of a thread.
template <class A, int P>
constexpr int resident = P* A::width > 40 ? 1 : 2;

template <class A, int P>
__global__ void __launch_bounds__(threads, resident<A, P>)
    cross_entropy_kernel(LossShape s, float gradient_scale, Src logits, const std::int32_t* labels, float* max,
                         float* stat, Dst dlogits) {
    constexpr int W = A::width;
    using Part = Slice<A, P>;
    extern __shared__ __align__(128) uint4 arriving[];
    __shared__ Exchange exchange;
    __shared__ typename Part::Arrival arrival;
    const int part = static_cast<int>(ptx::cluster_rank()), parts = static_cast<int>(ptx::cluster_ctas());
    const std::int64_t clusters = gridDim.x / parts, first = blockIdx.x / parts;
    const auto columns = static_cast<int>(s.vocab);
    if (s.share != nullptr) gradient_scale *= *s.share;
    const Part slice(s, part, parts, arriving, arrival);
    if (threadIdx.x == 0) {
        exchange.init(parts);
        ptx::fence_barrier_init();
        slice.fetch(s, first, logits);
    }
    ptx::cluster_sync();
    int round = 0;
    for (std::int64_t row = first; row < s.rows; row += clusters, ++round) {
        const int label = labels[row] < columns ? labels[row] : columns;
        const bool counts = label >= 0 && label < columns;
        float value[P][W], of_label = 0.0f;
        slice.read(round, value, counts ? label : -1, of_label);
        slice.replace(s, row + clusters, logits, round);
        Stat own{lowest, 0.0f};
#pragma unroll
        for (int p = 0; p < P; ++p) {
#pragma unroll
            for (int j = 0; j < W; ++j) own.largest = fmaxf(own.largest, value[p][j]);
        }
#pragma unroll
        for (int p = 0; p < P; ++p) {
#pragma unroll
            for (int j = 0; j < W; ++j) {
                value[p][j] = power_of_2(__fmaf_rn(value[p][j], log2_e, -own.base()));
                own.sum += value[p][j];
            }
        }
        exchange.send(round, part, parts, Stat::of_warp(own));
        const Stat all = exchange.receive(round, parts);
        const float scale = label < 0 ? 0.0f : gradient_scale / all.sum,
                    factor = scale * power_of_2(own.base() - all.base());
        const std::int64_t start = row * s.vocab_local;
#pragma unroll
        for (int p = 0; p < P; ++p) {
            if (!slice.has(p)) break;
#pragma unroll
            for (int j = 0; j < W; ++j) value[p][j] *= factor;
            A::put(dlogits, start + std::int64_t{slice.pack(p)} * W, value[p]);
        }
        if (counts && slice.owns(label)) {
            const float share = power_of_2(__fmaf_rn(of_label, log2_e, -all.base())) * scale;
            store(dlogits, start + label, share - gradient_scale); // The label's value replaces the loop's.
            stat[2 * row + 1] = of_label;
        }
        if (part == 0 && threadIdx.x == 0) {
            max[row] = all.largest;
            stat[2 * row] = label < 0 ? 0.0f : all.true_sum();
            if (!counts) stat[2 * row + 1] = 0.0f;
        }
    }
    ptx::cluster_sync(); // The other CTAs may still send.
}

template <class A, int P>
void launch(int ctas, const LossShape& s, float gradient_scale, Src logits, const std::int32_t* labels, float* max,
            float* stat, Dst dlogits, void* stream) {
    constexpr auto kernel = cross_entropy_kernel<A, P>;
    constexpr int shared = Slice<A, P>::bytes;
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
