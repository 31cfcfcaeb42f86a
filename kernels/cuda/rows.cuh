// A warp per row: rows that hold data, and the packs of a row several at a time.
#pragma once

#include "kernels/cuda/vector.cuh"

namespace moe::cuda {

inline constexpr int row_threads = 256, row_warps = row_threads / warp_size;

__device__ inline int lane_of_warp() { return static_cast<int>(threadIdx.x % warp_size); }

// A warp's rows: from its first on in steps, where the grid has fewer warps than there are rows.
__device__ inline std::int64_t first_row() { return std::int64_t{blockIdx.x} * row_warps + threadIdx.x / warp_size; }
__device__ inline std::int64_t row_step() { return std::int64_t{gridDim.x} * row_warps; }

// Calls body(row) for the rows of this warp out of those that hold data: all, or as many as [counts[groups]] say.
template <class Body>
__device__ void for_each_row(const std::int32_t* counts, int groups, std::int64_t rows, Body body) {
    if (counts != nullptr) rows = routed_rows(counts, groups, rows);
    for (std::int64_t row = first_row(); row < rows; row += row_step()) body(row);
}

// Does for packs [0, packs) that this lane owns: held = read(pack) for `together` of them, then write(pack, held) for
// each.
template <int together, class Read, class Write>
__device__ void for_each_pack(int packs, Read read, Write write) {
    for (int first = lane_of_warp(); first < packs; first += warp_size * together) {
        decltype(read(0)) held[together];
#pragma unroll
        for (int t = 0; t < together; ++t) {
            if (first + t * warp_size < packs) held[t] = read(first + t * warp_size);
        }
#pragma unroll
        for (int t = 0; t < together; ++t) {
            if (first + t * warp_size < packs) write(first + t * warp_size, held[t]);
        }
    }
}

// Does as for_each_pack() where lanes need each other: all of a warp come to write(pack, held, whether the pack is one
// of `packs`).
template <int together, class Read, class Write>
__device__ void for_packs_of_warp(int packs, Read read, Write write) {
    for (int start = 0; start < packs; start += warp_size * together) {
        const int first = start + lane_of_warp();
        decltype(read(0)) held[together];
#pragma unroll
        for (int t = 0; t < together; ++t) {
            if (first + t * warp_size < packs) held[t] = read(first + t * warp_size);
        }
#pragma unroll
        for (int t = 0; t < together; ++t) {
            if (start + t * warp_size < packs) write(first + t * warp_size, held[t], first + t * warp_size < packs);
        }
    }
}

// A warp for each of `rows`, in order: the rows at work lie side by side in memory.
template <auto kernel, class... Arguments>
void launch_rows(std::int64_t rows, void* stream, const Arguments&... arguments) {
    if (rows <= 0) return;
    const unsigned blocks = blocks_for(rows, row_warps);
    kernel<<<blocks, row_threads, 0, stream_of(stream)>>>(arguments...);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace moe::cuda
