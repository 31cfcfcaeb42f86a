// The grouped product of scaled E4M3 operands on Hopper: the frame of grouped_gemm.cuh, other products.
//
// The tensor cores add up 128 contracted elements, which have one scale per row of A and one per 128 rows of B; these
// sums are scaled and added to the tile's in FP32 registers, while the other warpgroup multiplies: the two take turns
// at the tensor cores block by block, which would otherwise serve both at once and leave both to add at once. (Within
// its own sums Hopper keeps about 14 bits of E4M3 products: DeepSeek-V3, arXiv:2412.19437, section 3.3.2.)
#pragma once

#include "kernels/cuda/sm90/grouped_gemm.cuh"

namespace moe::cuda::sm90 {

// Rows of 128 bytes are 128 contracted elements, one block of scales.
template <int columns, int stage_count, int buffer_count, Pair neighbours>
struct ScaledConfig : Config<GroupedProduct::forward, columns, stage_count, buffer_count, neighbours> {
    static constexpr int tile_k = 128;
    static constexpr bool ordered = true;
};

struct Scales { // [capacity, blocks] and [groups, columns of 128, blocks]
    const float *a, *b;
};

// Where a thread finds the scales of its two rows and of the tile's columns, 64 of which at least have one scale.
template <class C>
struct ScalesOfTile {
    static constexpr int pieces = C::tile_n % 128 == 0 ? C::tile_n / 128 : C::tile_n / 64;
    const float *upper, *lower, *columns[pieces];

    __device__ ScalesOfTile(const Scales& scales, const Grouped& p, const Tile& tile, int consumer, int blocks) {
        const int lane = static_cast<int>(threadIdx.x % 128), last_row = p.capacity - 1;
        const int row = tile.routed + consumer * 64 + lane / warp_size * 16 + lane % warp_size / 4;
        upper = scales.a + std::int64_t{row < last_row ? row : last_row} * blocks;
        lower = scales.a + std::int64_t{row + 8 < last_row ? row + 8 : last_row} * blocks;
        const int across = ceil_div(p.n, 128);
#pragma unroll
        for (int i = 0; i < pieces; ++i) {
            const int at = (tile.col + i * (C::tile_n / pieces)) / 128;
            columns[i] = scales.b + (std::int64_t{tile.group} * across + (at < across ? at : across - 1)) * blocks;
        }
    }
};

template <class C>
__device__ void multiply_scaled(const Grouped& p, const Scales& scales, const Shared<C>& shared, Ring<C::stages>& ring,
                                const Tile& tile, int consumer, Sums<C>& sums) {
    using Of = ScalesOfTile<C>;
    constexpr int count = C::tile_n / 2;
    const int blocks = ceil_div(p.depth, C::tile_k);
    const Of of(scales, p, tile, consumer, blocks);
    float(&sum)[count] = sums[0];
#pragma unroll
    for (int i = 0; i < count; ++i) sum[i] = 0.0f;
    float part[count], upper = *of.upper, lower = *of.lower, columns[Of::pieces];
#pragma unroll
    for (int i = 0; i < Of::pieces; ++i) columns[i] = *of.columns[i];
    const bool both = tile.rows_left > 64; // warpgroups multiply
    for (int block = 0; block < blocks; ++block, ring.advance()) {
        ptx::wait(shared.full(ring.stage), ring.parity);
        if (both) await_turn<C>(consumer);
        const std::uint64_t a = ptx::describe<C::box_bytes>(shared.a(ring.stage) + consumer * C::box_bytes);
        const std::uint64_t b = ptx::describe<C::box_bytes>(shared.b(ring.stage));
        ptx::fence_products();
#pragma unroll
        for (int i = 0; i < 3; ++i) ptx::multiply_f8(part, a + i * 2, b + i * 2, i); // 32 bytes further each time
        ptx::commit_products();
        ptx::multiply_f8(part, a + 6, b + 6, 1);
        ptx::commit_products();
        float scale[Of::pieces][2];
#pragma unroll
        for (int i = 0; i < Of::pieces; ++i) scale[i][0] = columns[i] * upper, scale[i][1] = columns[i] * lower;
        const int next = block + 1 < blocks ? block + 1 : block; // its scales arrive while this one is multiplied
        upper = of.upper[next], lower = of.lower[next];
#pragma unroll
        for (int i = 0; i < Of::pieces; ++i) columns[i] = of.columns[i][next];
        if (both) {
            ptx::wait_products<1>();
            give_turn<C>(consumer ^ 1); // before the last product ends, so that the next one follows at once
        }
        ptx::wait_products<0>();
        ptx::settle(part);
        release(shared, ring.stage);
#pragma unroll
        for (int i = 0; i < count; ++i) sum[i] += part[i] * scale[i * Of::pieces / count][i / 2 % 2];
    }
}

template <class C>
__global__ void __launch_bounds__(C::threads, 1)
    scaled_kernel(const __grid_constant__ Maps maps, Grouped p, Scales scales, Dst c) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ unsigned char memory[];
    run<C>(maps, p, c, memory,
           [&](const Shared<C>& shared, Ring<C::stages>& ring, const Tile& tile, int consumer, Sums<C>& sum) {
               multiply_scaled<C>(p, scales, shared, ring, tile, consumer, sum);
           });
#endif
}

} // namespace moe::cuda::sm90
