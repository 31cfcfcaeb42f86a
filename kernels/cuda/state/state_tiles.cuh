// Tiles of BF16 in shared memory and products of them by warps, for layers with a state on the tensor cores.
//
// A warp's product has 16 rows; its sums are pieces of eight columns as m16n8k16 has them (ptx/mma.cuh).
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/ptx/barrier.cuh"
#include "kernels/cuda/ptx/mma.cuh"
#include "kernels/cuda/vector.cuh"

#include <algorithm>

namespace moe::cuda {

using Element = __nv_bfloat16;
inline constexpr int pack = 16 / sizeof(Element);

__device__ inline unsigned both(float low, float high) {
    unsigned two;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(high), "f"(low));
    return two;
}
__device__ inline float low_of(unsigned two) { return __uint_as_float(two << 16); }
__device__ inline float high_of(unsigned two) { return __uint_as_float(two & 0xffff0000u); }
__device__ inline float power(float x) { // of two
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(all_lanes, x, 1);
    return x + __shfl_xor_sync(all_lanes, x, 2);
}
// c[16, 16] += a b, of two pieces of eight columns.
__device__ inline void multiply(float (&c0)[4], float (&c1)[4], const unsigned (&a)[4], const unsigned (&b)[4]) {
    ptx::multiply_16x8(c0, a, b[0], b[1]);
    ptx::multiply_16x8(c1, a, b[2], b[3]);
}
// Sums of 16 columns as the left operand of a product that contracts them.
__device__ inline void left_of(const float (&c0)[4], const float (&c1)[4], unsigned (&a)[4]) {
    a[0] = both(c0[0], c0[1]), a[1] = both(c0[2], c0[3]), a[2] = both(c1[0], c1[1]), a[3] = both(c1[2], c1[3]);
}

// Operands out of a tile, where Layout::at(tile, row, pack) is the address of eight elements of a row.
template <class Layout>
struct Operands {
    // Two neighbouring elements, the first of them even.
    __device__ static float2 pair(unsigned tile, int row, int column) {
        unsigned two;
        asm volatile("ld.shared.b32 %0, [%1];"
                     : "=r"(two)
                     : "r"(Layout::at(tile, row, column / pack) + static_cast<unsigned>(column % pack * 2)));
        return {low_of(two), high_of(two)};
    }
    __device__ static void put_pair(unsigned tile, int row, int column, unsigned two) {
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(Layout::at(tile, row, column / pack) +
                                                     static_cast<unsigned>(column % pack * 2)),
                     "r"(two)
                     : "memory");
    }
    // Operands of a warp's product: the left one 16 rows from `row` on, the right one 16 columns as two of eight, of 16
    // contracted elements. _across: contracted are rows of the tile, not columns. Block: 16 of them.
    __device__ static void left(unsigned tile, int row, int block, unsigned (&a)[4]) {
        ptx::read_matrices(a, Layout::at(tile, row + lane() % 16, block * 2 + lane() / 16));
    }
    __device__ static void left_across(unsigned tile, int columns_block, int block, unsigned (&a)[4]) {
        ptx::read_matrices_transposed(
            a, Layout::at(tile, block * 16 + lane() % 8 + lane() / 16 * 8, columns_block * 2 + lane() / 8 % 2));
    }
    __device__ static void right(unsigned tile, int rows_block, int block, unsigned (&b)[4]) {
        ptx::read_matrices(
            b, Layout::at(tile, rows_block * 16 + lane() % 8 + lane() / 16 * 8, block * 2 + lane() / 8 % 2));
    }
    __device__ static void right_across(unsigned tile, int columns_block, int block, unsigned (&b)[4]) {
        ptx::read_matrices_transposed(b, Layout::at(tile, block * 16 + lane() % 16, columns_block * 2 + lane() / 16));
    }

private:
    __device__ static int lane() { return static_cast<int>(threadIdx.x) % warp_size; }
};

// 16 bytes to shared memory, zeros where `there` is false. Under way when this returns.
__device__ inline void copy_or_clear(unsigned to, const Element* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

// Rows of `columns` elements. The eight rows of a matrix of ldmatrix lie in different banks: packs of 16 bytes change
// places by their row, or rows are a pack apart.
template <int columns, bool swizzled_ = columns % 64 == 0>
struct Tile : Operands<Tile<columns, swizzled_>> {
    static constexpr bool swizzled = swizzled_;
    static constexpr int stride = swizzled ? columns : columns + pack, packs = columns / pack;
    __host__ __device__ static constexpr int bytes(int rows) {
        return rows * stride * static_cast<int>(sizeof(Element));
    }
    static_assert(columns % 16 == 0);

    __device__ static unsigned at(unsigned tile, int row, int pack_of_row) {
        return tile + static_cast<unsigned>(row * stride * 2 + (swizzled ? pack_of_row ^ (row & 7) : pack_of_row) * 16);
    }
    // Row i < n of so many is x + i step, its first `width` columns; the others are zeros. Under way when this returns.
    template <int block = 256> // threads
    __device__ static void load(unsigned tile, int rows, const Element* x, std::int64_t step, int n,
                                int width = columns) {
        const int t = static_cast<int>(threadIdx.x);
        constexpr int down = block / packs / 8 * 8; // rows at once
        if constexpr (down > 0) { // a thread keeps its pack of the rows, and what changes their places
            if (down * packs < block && t >= down * packs) return;
            const int row = t / packs, j = t % packs;
            const bool within = j * pack < width;
            const Element* from = x + row * step + j * pack;
            const unsigned to = at(tile, row, j);
#pragma unroll
            for (int i = 0; i < rows; i += down) {
                if (rows % down != 0 && row + i >= rows) break;
                const bool there = within && row + i < n;
                copy_or_clear(to + static_cast<unsigned>(i * stride * 2), there ? from : x, there);
                from += down * step;
            }
        } else {
            for (int item = t; item < rows * packs; item += block) {
                const int i = item / packs, j = item % packs;
                const bool there = i < n && j * pack < width;
                copy_or_clear(at(tile, i, j), there ? x + i * step + j * pack : x, there);
            }
        }
    }
};

// Matrices of 8 x 8 elements behind one another, first along a row of them: each is 128 bytes, so that what a warp
// reads or writes of one lies in all banks and, in global memory, in one line.
template <int columns>
struct Cores : Operands<Cores<columns>> {
    static constexpr int packs = columns / pack;
    __host__ __device__ static constexpr int bytes(int rows) {
        return rows * columns * static_cast<int>(sizeof(Element));
    }
    __device__ static unsigned at(unsigned tile, int row, int pack_of_row) {
        return tile + static_cast<unsigned>((row / 8 * packs + pack_of_row) * 128 + row % 8 * 16);
    }
    // A whole tile out of one in global memory. Under way when this returns.
    template <int block = 256> // threads
    __device__ static void load(unsigned tile, int rows, const Element* x) {
        for (int item = static_cast<int>(threadIdx.x); item < rows * packs; item += block)
            copy_or_clear(tile + static_cast<unsigned>(item * 16), x + item * pack, true);
    }
    // A warp's eight rows and columns, as its sums hold them, to global memory: matrix `down`, `across` of the tile.
    __device__ static void store(Element* x, int down, int across, unsigned two) {
        reinterpret_cast<unsigned*>(
            x)[(down * packs + across) * warp_size + static_cast<int>(threadIdx.x) % warp_size] = two;
    }
};

template <class Kernel>
void allow(Kernel* kernel, int bytes) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

} // namespace moe::cuda
