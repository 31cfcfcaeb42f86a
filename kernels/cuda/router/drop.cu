// Copies that are dropped: of every sequence an expert keeps the first of its copies in an order, as many as its
// capacity.
//
// A block for each sequence and expert. It counts its copies; only where they overflow it looks for the last one that
// is kept, 11 bits of the key at a time. Floor: index and weight in, kept and its weight out. Every block reads the
// indices of its sequence, out of the L2, twice where nothing overflows and seven times elsewhere.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/families.hpp"

namespace moe::cuda {
namespace {

constexpr int threads = 256, digit = 11, bins = 1 << digit, bins_each = bins / threads;
constexpr int place_digits = 3, key_digits = 5; // of the place alone, and of weight and place

using Key = unsigned long long;

struct Drop {
    DropShape s;
    const std::int32_t *index, *positions;
    const float* weight;

    // Copies of expert e in a sequence, by position; calls use(copy, key). Keys rise as copies come later in the order.
    template <class Use>
    __device__ void each(int e, std::int64_t sequence, Use use) const {
        const std::int64_t rows = s.rivals / s.sequences;
        for (std::int64_t at = threadIdx.x; at < rows; at += threads) {
            const std::int64_t first = (at * s.sequences + sequence) * s.top_k;
            for (int k = 0; k < s.top_k; ++k)
                if (index[first + k] == e) use(first + k, key(at, first + k));
        }
    }
    __device__ Key key(std::int64_t at, std::int64_t copy) const {
        const auto place = static_cast<unsigned>(positions == nullptr ? at : positions[at]);
        if (!s.by_weight) return place;
        const unsigned rank = (__float_as_uint(weight[copy]) + (1u << (22 - drop_bits))) >> (23 - drop_bits);
        return Key{(1u << (9 + drop_bits + 1)) - rank} << 32 | place;
    }
};

// The bin in which the `want`-th falls, and how many of that bin are wanted; the same in all threads.
__device__ int find_bin(const int* count, int& want) {
    __shared__ int before[threads / warp_size], found, left;
    const int lane = static_cast<int>(threadIdx.x) % warp_size, warp = static_cast<int>(threadIdx.x) / warp_size;
    int own[bins_each], sum = 0;
#pragma unroll
    for (int i = 0; i < bins_each; ++i) sum += own[i] = count[threadIdx.x * bins_each + i];
    int end = sum; // of the bins up to this thread's last
    for (int offset = 1; offset < warp_size; offset *= 2) {
        const int other = __shfl_up_sync(all_lanes, end, offset);
        if (lane >= offset) end += other;
    }
    if (lane == warp_size - 1) before[warp] = end;
    __syncthreads();
    for (int w = 0; w < warp; ++w) end += before[w];
    if (end - sum < want && want <= end) {
        int here = end - sum;
#pragma unroll
        for (int i = 0; i < bins_each; ++i) {
            if (here < want && want <= here + own[i]) {
                found = static_cast<int>(threadIdx.x) * bins_each + i;
                left = want - here;
            }
            here += own[i];
        }
    }
    __syncthreads();
    want = left;
    return found;
}

// Key of the want-th copy in the order; 1 <= want <= the expert's copies.
__device__ Key last_kept(const Drop& drop, int e, std::int64_t sequence, int want) {
    __shared__ int count[bins];
    Key prefix = 0;
    for (int part = (drop.s.by_weight ? key_digits : place_digits) - 1; part >= 0; --part) {
        const int shift = part * digit;
        __syncthreads();
        for (int i = static_cast<int>(threadIdx.x); i < bins; i += threads) count[i] = 0;
        __syncthreads();
        drop.each(e, sequence, [&](std::int64_t, Key key) {
            if (key >> (shift + digit) == prefix) atomicAdd(&count[key >> shift & (bins - 1)], 1); // whole numbers
        });
        __syncthreads();
        prefix = prefix << digit | static_cast<Key>(find_bin(count, want));
    }
    return prefix;
}

__global__ void __launch_bounds__(threads) drop_kernel(Drop drop, std::int32_t* kept, float* kept_weight) {
    const DropShape& s = drop.s;
    const int e = static_cast<int>(blockIdx.x);
    const std::int64_t sequence = blockIdx.y;
    long long copies = 0;
    drop.each(e, sequence, [&](std::int64_t, Key) { ++copies; });
    copies = block_sum(copies);
    const bool all = copies <= s.capacity;
    const Key last = all || s.capacity <= 0 ? 0 : last_kept(drop, e, sequence, static_cast<int>(s.capacity));
    drop.each(e, sequence, [&](std::int64_t copy, Key key) {
        const std::int64_t to = copy - s.first * s.top_k;
        if (to < 0 || to >= s.tokens * s.top_k) return;
        const bool stays = all || (s.capacity > 0 && key <= last);
        kept[to] = stays ? e : -1;
        kept_weight[to] = stays ? drop.weight[copy] : 0.0f;
    });
}

void drop_copies(const DropShape& s, const std::int32_t* index, const float* weight, const std::int32_t* positions,
                 std::int32_t* kept, float* kept_weight, void* stream) {
    if (s.tokens <= 0) return;
    require(s.sequences <= 65535, "sequences whose copies are dropped", s.sequences, 65535);
    const dim3 grid(static_cast<unsigned>(s.experts), static_cast<unsigned>(s.sequences));
    drop_kernel<<<grid, threads, 0, stream_of(stream)>>>({s, index, positions, weight}, kept, kept_weight);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_drop(Kernels& table) { table.drop_copies = drop_copies; }

} // namespace moe::cuda
