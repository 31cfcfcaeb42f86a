// The tools that the CUDA kernels share: elements of either storage type, reductions, rows of groups, launch shapes.
#pragma once

#include "kernels/cuda/check.hpp"
#include "kernels/kernels.hpp"

#include <cuda_bf16.h>
#include <cuda_runtime.h>

namespace moe::cuda {

inline constexpr int warp_size = 32;
inline constexpr unsigned all_lanes = 0xffffffffu;

inline cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }

template <class T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

// Blocks for `items` of work, `each` per block. Kernels with a limited grid step through the rest.
inline unsigned blocks_for(std::int64_t items, std::int64_t each, std::int64_t limit = 0x7fffffff) {
    const std::int64_t blocks = ceil_div(items, each);
    return static_cast<unsigned>(blocks < limit ? blocks : limit);
}

// The storage type is the same for all threads, so the branch costs no divergence; one kernel serves every mixture.
__device__ inline float load(Src x, std::int64_t i) {
    return x.type == Type::f32 ? static_cast<const float*>(x.data)[i]
                               : __bfloat162float(static_cast<const __nv_bfloat16*>(x.data)[i]);
}
__device__ inline void store(Dst y, std::int64_t i, float value) {
    if (y.type == Type::f32) {
        static_cast<float*>(y.data)[i] = value;
    } else {
        static_cast<__nv_bfloat16*>(y.data)[i] = __float2bfloat16_rn(value);
    }
}
__device__ inline Src read_back(Dst y) { return Src{y.data, y.type}; }

template <class T>
__device__ T warp_sum(T value) {
    for (int offset = warp_size / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(all_lanes, value, offset);
    return value;
}
__device__ inline float warp_max(float value) {
    for (int offset = warp_size / 2; offset > 0; offset /= 2) {
        value = fmaxf(value, __shfl_xor_sync(all_lanes, value, offset));
    }
    return value;
}

// Sum over a one-dimensional block of whole warps, the same in every thread; all threads must come.
template <class T>
__device__ T block_sum(T value) {
    __shared__ T part[warp_size];
    const unsigned lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
    value = warp_sum(value);
    __syncthreads(); // The sum before this one has been read.
    if (lane == 0) part[warp] = value;
    __syncthreads();
    return warp_sum(lane < blockDim.x / warp_size ? part[lane] : T(0));
}
__device__ inline float block_max(float value) {
    __shared__ float part[warp_size];
    const unsigned lane = threadIdx.x % warp_size, warp = threadIdx.x / warp_size;
    value = warp_max(value);
    __syncthreads();
    if (lane == 0) part[warp] = value;
    __syncthreads();
    return warp_max(lane < blockDim.x / warp_size ? part[lane] : -INFINITY);
}

__device__ inline std::int64_t count_of(const std::int32_t* counts, int e) { return counts[e] > 0 ? counts[e] : 0; }

// Rows that the groups hold together, cut at the capacity; a whole warp asks at once.
__device__ inline std::int64_t routed_rows(const std::int32_t* counts, int groups, std::int64_t capacity) {
    long long rows = 0;
    for (int e = static_cast<int>(threadIdx.x % warp_size); e < groups; e += warp_size) rows += count_of(counts, e);
    rows = warp_sum(rows);
    return rows < capacity ? rows : capacity;
}

// The group that row belongs to, -1 beyond the last; a whole warp asks for one row.
__device__ inline int group_of(const std::int32_t* counts, int groups, std::int64_t row) {
    const int lane = static_cast<int>(threadIdx.x % warp_size);
    long long before = 0;
    for (int base = 0; base < groups; base += warp_size) {
        long long end = base + lane < groups ? count_of(counts, base + lane) : 0;
        for (int offset = 1; offset < warp_size; offset *= 2) {
            const long long left = __shfl_up_sync(all_lanes, end, offset);
            if (lane >= offset) end += left;
        }
        const unsigned beyond = __ballot_sync(all_lanes, row < before + end && base + lane < groups);
        if (beyond != 0) return base + __ffs(static_cast<int>(beyond)) - 1;
        before += __shfl_sync(all_lanes, end, warp_size - 1);
    }
    return -1;
}

struct Rows {
    std::int64_t begin, end;
};
// Rows of group e, cut at the capacity; the whole block asks at once.
__device__ inline Rows rows_of_group(const std::int32_t* counts, int e, std::int64_t capacity) {
    long long before = 0;
    for (int i = static_cast<int>(threadIdx.x); i < e; i += static_cast<int>(blockDim.x)) before += count_of(counts, i);
    before = block_sum(before);
    const long long end = before + count_of(counts, e);
    return {before < capacity ? before : capacity, end < capacity ? end : capacity};
}

__device__ inline bool aligned16(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

// Moves n elements, thread `thread` of `threads` taking its share; 16 bytes at a time where types and addresses allow.
__device__ inline void copy_row(Src x, std::int64_t from, Dst y, std::int64_t to, std::int64_t n, int thread,
                                int threads) {
    std::int64_t done = 0;
    if (x.type == y.type) {
        const int bytes = x.type == Type::f32 ? 4 : 2, wide = 16 / bytes;
        const char* source = static_cast<const char*>(x.data) + from * bytes;
        char* target = static_cast<char*>(y.data) + to * bytes;
        if (aligned16(source) && aligned16(target)) {
            for (std::int64_t i = thread; i < n / wide; i += threads) {
                reinterpret_cast<uint4*>(target)[i] = reinterpret_cast<const uint4*>(source)[i];
            }
            done = n / wide * wide;
        }
    }
    for (std::int64_t i = done + thread; i < n; i += threads) store(y, to + i, load(x, from + i));
}

} // namespace moe::cuda
