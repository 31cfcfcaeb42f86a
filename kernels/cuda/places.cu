// Places of routed copies in expert-major order, and what fits into the buffers.
#include "kernels/cuda/device.cuh"
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
            if (e == 0 && i < copies && index[i] < 0) row_of[i] = -1; // dropped: no expert numbers it
            mine[j] = __ballot_sync(all_lanes, i < copies && index[i] == e);
            count += __popc(mine[j]);
        }
        __syncthreads(); // the counts before have been read
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

// Many copies are cut into chunks: each is counted by expert, the counts become the places where a chunk's copies of an
// expert begin, and each chunk numbers its own. The index is read twice.
constexpr int chunk_strips = 4, chunk_copies = threads * chunk_strips;
constexpr int most_experts = 512; // whose counts per warp fit shared memory
constexpr std::int64_t few_copies = 8192;

// The expert of this lane's copy in a strip of its warp, -1 for none.
__device__ int expert_of(const std::int32_t* index, std::int64_t copies, int strip, std::int64_t& copy) {
    const std::int64_t warp = std::int64_t{blockIdx.x} * warps + threadIdx.x / warp_size;
    copy = (warp * chunk_strips + strip) * warp_size + threadIdx.x % warp_size;
    return copy < copies ? index[copy] : -1;
}

// counts[warp][expert] of this block's chunk
__device__ void count_chunk(const std::int32_t* index, std::int64_t copies, int experts,
                            int (&counts)[warps][most_experts]) {
    const int lane = static_cast<int>(threadIdx.x % warp_size), warp = static_cast<int>(threadIdx.x / warp_size);
    for (int e = lane; e < experts; e += warp_size) counts[warp][e] = 0;
    __syncwarp();
    for (int strip = 0; strip < chunk_strips; ++strip) {
        std::int64_t copy = 0;
        const int e = expert_of(index, copies, strip, copy);
        const unsigned same = __match_any_sync(all_lanes, e);
        if (e >= 0 && lane == __ffs(static_cast<int>(same)) - 1) counts[warp][e] += __popc(same);
        __syncwarp();
    }
    __syncthreads();
}

// found[chunk][expert]
__global__ void __launch_bounds__(threads)
    count_chunks_kernel(const std::int32_t* index, std::int64_t copies, int experts, std::int32_t* found) {
    __shared__ int counts[warps][most_experts];
    count_chunk(index, copies, experts, counts);
    for (int e = static_cast<int>(threadIdx.x); e < experts; e += threads) {
        int sum = 0;
        for (int w = 0; w < warps; ++w) sum += counts[w][e];
        found[std::int64_t{blockIdx.x} * experts + e] = sum;
    }
}

// The sum of a value over the threads before this one; all threads come. `total`: over all.
__device__ int sum_before(int value, int& total) {
    __shared__ int part[warps];
    const int lane = static_cast<int>(threadIdx.x % warp_size), warp = static_cast<int>(threadIdx.x / warp_size);
    int sum = value;
    for (int offset = 1; offset < warp_size; offset *= 2) {
        const int left = __shfl_up_sync(all_lanes, sum, offset);
        if (lane >= offset) sum += left;
    }
    __syncthreads(); // the sums before have been read
    if (lane == warp_size - 1) part[warp] = sum;
    __syncthreads();
    total = 0;
    int before = 0;
    for (int w = 0; w < warps; ++w) {
        if (w < warp) before += part[w];
        total += part[w];
    }
    return before + sum - value;
}

// A block per expert: found[chunk][expert] becomes what lies before the chunk, counts[expert] the sum.
__global__ void __launch_bounds__(threads)
    begin_chunks_kernel(std::int32_t* found, std::int64_t chunks, int experts, std::int32_t* counts) {
    std::int32_t* const column = found + blockIdx.x;
    int next = 0;
    for (std::int64_t base = 0; base < chunks; base += threads) {
        const std::int64_t chunk = base + threadIdx.x;
        const int value = chunk < chunks ? column[chunk * experts] : 0;
        int total = 0;
        const int before = sum_before(value, total);
        if (chunk < chunks) column[chunk * experts] = next + before;
        next += total;
    }
    if (threadIdx.x == 0) counts[blockIdx.x] = next;
}

__global__ void __launch_bounds__(threads)
    place_chunks_kernel(const std::int32_t* index, const std::int32_t* counts, const std::int32_t* begin,
                        std::int32_t* row_of, std::int32_t* filled, std::int64_t copies, int experts,
                        std::int64_t padded) {
    __shared__ int next[warps][most_experts]; // row of the next copy of an expert in a warp
    const int lane = static_cast<int>(threadIdx.x % warp_size), warp = static_cast<int>(threadIdx.x / warp_size);
    count_chunk(index, copies, experts, next);
    int first = 0; // row of the expert
    for (int base = 0; base < experts; base += threads) {
        const int e = base + static_cast<int>(threadIdx.x);
        int total = 0;
        const int before = sum_before(e < experts ? counts[e] : 0, total);
        if (e < experts) {
            int row = padded > 0 ? static_cast<int>(e * padded) : first + before;
            row += begin[std::int64_t{blockIdx.x} * experts + e];
            for (int w = 0; w < warps; ++w) {
                const int count = next[w][e];
                next[w][e] = row;
                row += count;
            }
            if (filled != nullptr && blockIdx.x == 0) filled[e] = static_cast<std::int32_t>(padded);
        }
        first += total;
    }
    __syncthreads();
    for (int strip = 0; strip < chunk_strips; ++strip) {
        std::int64_t copy = 0;
        const int e = expert_of(index, copies, strip, copy);
        const unsigned same = __match_any_sync(all_lanes, e);
        const int before = __popc(same & ((1u << lane) - 1u));
        if (copy < copies) row_of[copy] = e >= 0 ? next[warp][e] + before : -1;
        __syncwarp();
        if (e >= 0 && before == 0) next[warp][e] += __popc(same);
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

void permute_map(const std::int32_t* index, std::int32_t* counts, std::int32_t* row_of, std::int32_t* filled,
                 std::int64_t tokens, int top_k, int experts, std::int64_t padded, void* stream) {
    if (experts <= 0) return;
    const auto grid = static_cast<unsigned>(experts);
    const std::int64_t copies = tokens * top_k, chunks = ceil_div(copies, std::int64_t{chunk_copies});
    if (copies <= few_copies || experts > most_experts || chunks * experts > scratch_floats) {
        count_kernel<<<grid, map_threads, 0, stream_of(stream)>>>(index, counts, copies);
        CUDA_CHECK(cudaGetLastError());
        place_kernel<<<grid, map_threads, 0, stream_of(stream)>>>(index, counts, row_of, filled, copies, padded);
        CUDA_CHECK(cudaGetLastError());
        return;
    }
    auto* const found = reinterpret_cast<std::int32_t*>(scratch_of(stream_of(stream)));
    const unsigned blocks = blocks_for(chunks, 1);
    count_chunks_kernel<<<blocks, threads, 0, stream_of(stream)>>>(index, copies, experts, found);
    CUDA_CHECK(cudaGetLastError());
    begin_chunks_kernel<<<grid, threads, 0, stream_of(stream)>>>(found, chunks, experts, counts);
    CUDA_CHECK(cudaGetLastError());
    place_chunks_kernel<<<blocks, threads, 0, stream_of(stream)>>>(index, counts, found, row_of, filled, copies,
                                                                   experts, padded);
    CUDA_CHECK(cudaGetLastError());
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
