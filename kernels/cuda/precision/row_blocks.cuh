// Blocks of rows of which each group's first begins one: which rows block number i has.
#pragma once

#include "kernels/cuda/device.cuh"

namespace moe::cuda {

struct RowBlock {
    std::int64_t first;               // row of the buffer
    int rows;                         // none: there is no such block
    std::int64_t group = 0, from = 0; // the first row's group, and its number there
};

// The sum of the values of this lane and of those before it.
__device__ inline long long warp_prefix(long long value) {
    const int lane = static_cast<int>(threadIdx.x % warp_size);
    for (int offset = 1; offset < warp_size; offset *= 2) {
        const long long left = __shfl_up_sync(all_lanes, value, offset);
        if (lane >= offset) value += left;
    }
    return value;
}

// Block `index` of `size` rows; rows that counts speak of are cut at `rows`. A whole warp asks at once.
template <int size>
__device__ RowBlock block_of_groups(const std::int32_t* counts, int groups, std::int64_t rows, std::int64_t index) {
    const int lane = static_cast<int>(threadIdx.x % warp_size);
    long long rows_before = 0, blocks_before = 0;
    for (int base = 0; base < groups; base += warp_size) {
        const long long count = base + lane < groups ? count_of(counts, base + lane) : 0;
        const long long end = rows_before + warp_prefix(count), begin = end - count;
        const long long held = begin >= rows ? 0 : count < rows - begin ? count : rows - begin;
        const long long blocks = ceil_div(held, static_cast<long long>(size));
        const long long last = blocks_before + warp_prefix(blocks);
        const unsigned beyond = __ballot_sync(all_lanes, index < last);
        if (beyond != 0) {
            const int group = __ffs(static_cast<int>(beyond)) - 1;
            const long long from = (index - __shfl_sync(all_lanes, last - blocks, group)) * size;
            const long long left = __shfl_sync(all_lanes, held, group) - from;
            return {__shfl_sync(all_lanes, begin, group) + from, static_cast<int>(left < size ? left : size),
                    base + group, from};
        }
        rows_before = __shfl_sync(all_lanes, end, warp_size - 1);
        blocks_before = __shfl_sync(all_lanes, last, warp_size - 1);
    }
    return {0, 0};
}

// The same of runs of rows without counts.
template <int size>
__device__ RowBlock block_of_runs(std::int64_t run, std::int64_t rows, std::int64_t index) {
    const std::int64_t blocks = ceil_div(run, std::int64_t{size}), from = index % blocks * size,
                       begin = index / blocks * run, first = begin + from;
    const std::int64_t left = min(min(run - from, rows - first), std::int64_t{size});
    return {first, static_cast<int>(left > 0 ? left : 0), 0, from};
}

} // namespace moe::cuda
