// Places of routed copies in expert-major order, and what fits into the buffers.
#include "kernels/cuda/behind.cuh"
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/scratch.hpp"

namespace moe::cuda {
namespace {

constexpr int threads = 256, warps = threads / warp_size;
constexpr int map_threads = 1024, map_warps = map_threads / warp_size;
constexpr int map_strips = 4; // ballots per warp between two scans of the block

// One block per expert: counts its copies.
__global__ void __launch_bounds__(map_threads)
    count_kernel(const std::int32_t* index, std::int32_t* counts, std::int64_t copies) {
    const int e = static_cast<int>(blockIdx.x);
    int count = 0;
    for (std::int64_t i = threadIdx.x; i < copies; i += map_threads) count += index[i] == e ? 1 : 0;
    count = block_sum(count);
    if (threadIdx.x == 0) counts[e] = count;
}

// One block per expert goes over all copies in order and numbers its own: a stable counting sort without atomics. The
// index is read once per expert, out of the L2 cache.
__global__ void __launch_bounds__(map_threads)
    place_kernel(const std::int32_t* index, const std::int32_t* counts, std::int32_t* row_of, std::int32_t* filled,
                 std::int64_t copies, std::int64_t padded) {
    __shared__ int warp_counts[map_warps];
    const int e = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x % warp_size);
    const int warp = static_cast<int>(threadIdx.x / warp_size);
    int next = 0; // row of the next copy of this expert
    for (int i = static_cast<int>(threadIdx.x); i < e; i += map_threads) next += counts[i];
    next = block_sum(next);
    if (padded > 0) next = static_cast<int>(e * padded);
    if (filled != nullptr && threadIdx.x == 0) filled[e] = static_cast<std::int32_t>(padded);
    for (std::int64_t base = 0; base < copies; base += map_threads * map_strips) {
        const std::int64_t start = base + warp * warp_size * map_strips + lane;
        unsigned mine[map_strips];
        int count = 0;
#pragma unroll
        for (int j = 0; j < map_strips; ++j) {
            const std::int64_t i = start + j * warp_size;
            if (e == 0 && i < copies && index[i] < 0) row_of[i] = -1; // The copy was dropped: no expert numbers it.
            mine[j] = __ballot_sync(all_lanes, i < copies && index[i] == e);
            count += __popc(mine[j]);
        }
        __syncthreads(); // The previous counts have been read.
        if (lane == 0) warp_counts[warp] = count;
        __syncthreads();
        const int others = warp_counts[lane];
        int row = next + warp_sum(lane < warp ? others : 0);
        next += warp_sum(others);
#pragma unroll
        for (int j = 0; j < map_strips; ++j) {
            const unsigned before = mine[j] & ((1u << lane) - 1u);
            if ((mine[j] >> lane & 1u) != 0) row_of[start + j * warp_size] = row + __popc(before);
            row += __popc(mine[j]);
        }
    }
}
static_assert(map_warps == warp_size, "a warp scans the counts of all warps");

// Copies are cut into chunks of a block each: the first launch counts them by expert, and in the second every chunk
// adds up what lies before it and numbers its own. The index is read twice. The second looks for neighbours of one
// expert while the first still counts.
constexpr int most_experts = 512; // most experts whose counts per warp fit shared memory

// found[chunk][expert]
template <int strips>
__global__ void __launch_bounds__(map_threads)
    count_chunks_kernel(const std::int32_t* index, std::int64_t copies, int experts, std::int32_t* found) {
    __shared__ int counts[most_experts];
    let_next_come();
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < experts) counts[thread] = 0;
    int e[strips];
#pragma unroll
    for (int j = 0; j < strips; ++j) {
        const std::int64_t copy = (std::int64_t{blockIdx.x} * strips + j) * map_threads + thread;
        e[j] = copy < copies ? index[copy] : -1;
    }
    __syncthreads();
#pragma unroll
    for (const int expert : e) {
        if (expert >= 0) atomicAdd(counts + expert, 1);
    }
    __syncthreads();
    if (thread < experts) found[std::int64_t{blockIdx.x} * experts + thread] = counts[thread];
}

// The lanes of the warp whose copy goes to the same expert as this lane's, or to none either: a ballot per bit of the
// number, since __match_any_sync takes some 100 cycles.
__device__ unsigned same_expert(int e, int bits) {
    const unsigned some = __ballot_sync(all_lanes, e >= 0);
    unsigned same = e >= 0 ? some : ~some;
    for (int b = 0; b < bits; ++b) {
        const bool one = (e >> b & 1) != 0;
        const unsigned ones = __ballot_sync(all_lanes, one);
        same &= one ? ones : ~ones;
    }
    return same;
}

// The sum over a block of map_threads up to and with this thread.
__device__ int sum_up_to(int value) {
    __shared__ int part[map_warps];
    const int lane = static_cast<int>(threadIdx.x % warp_size), warp = static_cast<int>(threadIdx.x / warp_size);
    const auto scan = [lane](int sum) {
        for (int offset = 1; offset < warp_size; offset *= 2) {
            const int left = __shfl_up_sync(all_lanes, sum, offset);
            if (lane >= offset) sum += left;
        }
        return sum;
    };
    const int sum = scan(value);
    if (lane == warp_size - 1) part[warp] = sum;
    __syncthreads();
    const int before = __shfl_sync(all_lanes, scan(part[lane]), warp > 0 ? warp - 1 : 0);
    return sum + (warp > 0 ? before : 0);
}

template <int strips>
__global__ void __launch_bounds__(map_threads)
    place_chunks_kernel(const std::int32_t* index, const std::int32_t* found, std::int32_t* counts,
                        std::int32_t* row_of, std::int32_t* filled, std::int64_t copies, int experts, int bits,
                        std::int64_t padded) {
    static_assert(strips * map_threads < 1 << 16, "a chunk's copies are counted in 16 bits");
    __shared__ unsigned short of_warp[map_warps][most_experts]; // copies of each warp, then those of the warps before
    __shared__ int next[most_experts], total[most_experts];     // row of the chunk's first copy; copies of all chunks
    const int thread = static_cast<int>(threadIdx.x), lane = thread % warp_size, warp = thread / warp_size;
    unsigned short* const mine = of_warp[warp];
    const std::int64_t start = (std::int64_t{blockIdx.x} * map_threads + warp * warp_size) * strips + lane;
    int e[strips];
#pragma unroll
    for (int j = 0; j < strips; ++j) e[j] = start + j * warp_size < copies ? index[start + j * warp_size] : -1;
    if (thread < experts) next[thread] = total[thread] = 0;
    for (int i = lane; i < experts; i += warp_size) mine[i] = 0;
    __syncthreads();
    unsigned same[strips];
#pragma unroll
    for (int j = 0; j < strips; ++j) {
        same[j] = same_expert(e[j], bits);
        if (e[j] >= 0 && lane == __ffs(static_cast<int>(same[j])) - 1) mine[e[j]] += __popc(same[j]);
        __syncwarp();
    }
    __syncthreads();
    if (thread < experts) {
        int before = 0;
#pragma unroll 8
        for (int w = 0; w < map_warps; ++w) {
            const int count = of_warp[w][thread];
            of_warp[w][thread] = static_cast<unsigned short>(before);
            before += count;
        }
    }
    wait_for_last();
    const int slices = map_threads / experts; // threads that share an expert's chunks
    if (thread < slices * experts) {
        const int expert = thread % experts;
        int before = 0, all = 0;
        for (int chunk = thread / experts; chunk < static_cast<int>(gridDim.x); chunk += slices) {
            const int count = found[std::int64_t{chunk} * experts + expert];
            before += chunk < static_cast<int>(blockIdx.x) ? count : 0;
            all += count;
        }
        atomicAdd(next + expert, before);
        atomicAdd(total + expert, all);
    }
    __syncthreads();
    const int all = thread < experts ? total[thread] : 0, last = sum_up_to(all);
    if (thread < experts) {
        next[thread] += padded > 0 ? static_cast<int>(thread * padded) : last - all;
        if (blockIdx.x == 0) {
            counts[thread] = all;
            if (filled != nullptr) filled[thread] = static_cast<std::int32_t>(padded);
        }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < strips; ++j) {
        const int rank = __popc(same[j] & ((1u << lane) - 1u));
        const std::int64_t copy = start + j * warp_size;
        if (copy < copies) row_of[copy] = e[j] >= 0 ? next[e[j]] + mine[e[j]] + rank : -1;
        __syncwarp();
        if (e[j] >= 0 && rank == 0) mine[e[j]] += __popc(same[j]);
        __syncwarp();
    }
}

__global__ void __launch_bounds__(threads) expert_counts_kernel(const std::int32_t* all_counts, std::int32_t* counts,
                                                                int sources, int experts, int first, int local) {
    const int e = static_cast<int>(blockIdx.x * threads + threadIdx.x);
    if (e >= local) return;
    std::int32_t sum = 0;
    for (int g = 0; g < sources; ++g) sum += all_counts[std::int64_t{g} * experts + first + e];
    counts[e] = sum;
}

// Every block finds the fullest buffer by itself, out of the L2 cache, and fills its part of the places; a warp adds up
// what one buffer takes.
__global__ void __launch_bounds__(threads)
    fit_kernel(FitShape s, const std::int32_t* counts, const std::int32_t* row_of, std::int32_t* fitting,
               std::int32_t* fitting_row_of, float* overflow) {
    __shared__ long long fullest[warps];
    const int lane = static_cast<int>(threadIdx.x % warp_size), warp = static_cast<int>(threadIdx.x / warp_size);
    const int local = s.experts / s.ep, buffers = s.ep * s.etp;
    long long most = 0;
    for (int buffer = warp; buffer < buffers; buffer += warps) {
        const int p = buffer / s.etp, m = buffer % s.etp;
        long long rows = 0;
        for (int i = lane; i < s.ep * local; i += warp_size) {
            const std::int64_t row = std::int64_t{i / local} * s.etp + m;
            rows += counts[row * s.experts + p * local + i % local];
        }
        rows = warp_sum(rows);
        most = rows > most ? rows : most;
    }
    if (lane == 0) fullest[warp] = most;
    __syncthreads();
    for (int w = 0; w < warps; ++w) most = fullest[w] > most ? fullest[w] : most;
    const bool fits = most <= s.capacity;
    const std::int64_t first = std::int64_t{blockIdx.x} * threads + threadIdx.x,
                       step = std::int64_t{gridDim.x} * threads;
    for (std::int64_t i = first; i < std::int64_t{buffers} * s.experts; i += step) fitting[i] = fits ? counts[i] : 0;
    for (std::int64_t i = first; i < s.copies; i += step) fitting_row_of[i] = fits ? row_of[i] : -1;
    if (first == 0 && !fits) *overflow += static_cast<float>(most - s.capacity);
}

// The strips of a chunk: more blocks are done sooner, but each adds up what all of them found.
int strips_of(std::int64_t copies) { return copies <= 1 << 16 ? 1 : copies <= 1 << 18 ? 2 : copies <= 1 << 19 ? 4 : 8; }

void permute_map(const std::int32_t* index, std::int32_t* counts, std::int32_t* row_of, std::int32_t* filled,
                 std::int64_t tokens, int top_k, int experts, std::int64_t padded, void* stream) {
    if (experts <= 0) return;
    const std::int64_t copies = tokens * top_k;
    const int strips = strips_of(copies);
    const std::int64_t chunks = copies > 0 ? ceil_div(copies, std::int64_t{map_threads} * strips) : 1;
    if (experts > most_experts || chunks * experts > scratch_floats) {
        const auto grid = static_cast<unsigned>(experts);
        count_kernel<<<grid, map_threads, 0, stream_of(stream)>>>(index, counts, copies);
        CUDA_CHECK(cudaGetLastError());
        place_kernel<<<grid, map_threads, 0, stream_of(stream)>>>(index, counts, row_of, filled, copies, padded);
        CUDA_CHECK(cudaGetLastError());
        return;
    }
    int bits = 0; // bits of an expert's number
    while (1 << bits < experts) ++bits;
    auto* const found = reinterpret_cast<std::int32_t*>(scratch_of(stream_of(stream)));
    const unsigned blocks = blocks_for(chunks, 1);
    const auto launch = [&](auto of_chunk) {
        count_chunks_kernel<of_chunk()><<<blocks, map_threads, 0, stream_of(stream)>>>(index, copies, experts, found);
        CUDA_CHECK(cudaGetLastError());
        launch_behind(place_chunks_kernel<of_chunk()>, dim3(blocks), map_threads, stream, index, found, counts, row_of,
                      filled, copies, experts, bits, padded);
    };
    if (strips == 1) return launch(std::integral_constant<int, 1>{});
    if (strips == 2) return launch(std::integral_constant<int, 2>{});
    if (strips == 4) return launch(std::integral_constant<int, 4>{});
    launch(std::integral_constant<int, 8>{});
}

void expert_counts(const std::int32_t* all_counts, std::int32_t* counts, int sources, int experts, int first, int local,
                   void* stream) {
    if (local <= 0) return;
    expert_counts_kernel<<<blocks_for(local, threads), threads, 0, stream_of(stream)>>>(all_counts, counts, sources,
                                                                                        experts, first, local);
    CUDA_CHECK(cudaGetLastError());
}

void fit_rows(const FitShape& s, const std::int32_t* counts, const std::int32_t* row_of, std::int32_t* fitting,
              std::int32_t* fitting_row_of, float* overflow, void* stream) {
    constexpr std::int64_t most_blocks = 64;
    const std::int64_t cells = std::int64_t{s.ep} * s.etp * s.experts;
    const unsigned blocks = blocks_for(s.copies > cells ? s.copies : cells, threads, most_blocks);
    if (blocks == 0) return;
    fit_kernel<<<blocks, threads, 0, stream_of(stream)>>>(s, counts, row_of, fitting, fitting_row_of, overflow);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_places(Kernels& table) {
    table.permute_map = permute_map;
    table.expert_counts = expert_counts;
    table.fit_rows = fit_rows;
}

} // namespace moe::cuda
