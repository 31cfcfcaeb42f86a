// What the kernels of an indexer share on tensor cores: tiles of queries and keys of 128 columns in shared memory.
#pragma once

#include "kernels/cuda/ptx/barrier.cuh"
#include "kernels/cuda/ptx/mma.cuh"
#include "kernels/cuda/sparse/sparse.cuh"

#include <algorithm>
#include <initializer_list>

namespace moe::cuda::sparse_index {

// Columns of a head, heads at most, threads and keys of a tile; bytes of a row, whose padding spreads rows over banks.
inline constexpr int wide = 128, most_heads = 64, threads = 128, tile = 64, slices = wide / 16;
inline constexpr int row_bytes = wide * 2 + 16, tile_bytes = tile * row_bytes;

// The left operand: 16 rows from `row` on and the 16 columns number `slice`.
__device__ inline void read_left(unsigned (&to)[4], unsigned tile, int row, int slice) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    ptx::read_matrices(to, tile + (row + lane % 16) * row_bytes + slice * 32 + lane / 16 * 16);
}
// The right operand of two slices, whose columns are 8 rows of the tile: words 0 and 1 of the first, 2 and 3 of the
// second.
__device__ inline void read_right(unsigned (&to)[4], unsigned tile, int row, int two_slices) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    ptx::read_matrices(to, tile + (row + lane % 8) * row_bytes + two_slices * 64 + lane / 8 * 16);
}
// The right operand of one slice of 16 rows and 16 columns: words 0 and 1 of the first eight columns, then the others.
__device__ inline void read_right_rows(unsigned (&to)[4], unsigned tile, int row, int column) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    ptx::read_matrices_transposed(to, tile + (row + lane % 16) * row_bytes + column * 2 + lane / 16 * 16);
}

__device__ inline unsigned pack_two(float first, float second) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const unsigned*>(&two);
}

// Begins the copy of `rows` rows; row r comes from source(r), zeros where that is null. All threads of the block come.
template <class Source>
__device__ void copy_rows(unsigned to, int rows, const __nv_bfloat16* any, const Source& source) {
    const int lane = static_cast<int>(threadIdx.x) % 16;
    for (int row = static_cast<int>(threadIdx.x) / 16; row < rows; row += threads / 16) {
        const __nv_bfloat16* const from = source(row);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + row * row_bytes + lane * 16),
                     "l"((from != nullptr ? from : any) + lane * 8), "r"(from != nullptr ? 16 : 0)
                     : "memory");
    }
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending>
__device__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

inline bool takes(const IndexShape& s, std::initializer_list<Src> operands) {
    return s.dim == wide && s.heads <= most_heads && s.heads % 8 == 0 &&
           std::all_of(operands.begin(), operands.end(), [](const Src& x) {
               return x.type == Type::bf16 && reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0;
           });
}

} // namespace moe::cuda::sparse_index
