// The grouped product of scaled E4M3 operands, or E5M2 by E4M3, on Hopper: the frame of grouped_gemm.cuh, other
// products.
//
// The tensor cores add up 128 contracted elements, which have one scale per row of A and one per 128 rows of B; these
// sums are scaled and added to the tile's in FP32 registers, while the other warpgroup multiplies. The two keep out of
// each other's way unasked: orders among them cost more than what they save. (Within its own sums Hopper keeps about 14
// bits of E4M3 products: DeepSeek-V3, arXiv:2412.19437, section 3.3.2.)
#pragma once

#include "kernels/cuda/sm90/grouped_gemm.cuh"

namespace moe::cuda::sm90 {

// Rows of 128 bytes are 128 contracted elements, one block of scales.
template <bool wide, int columns, int stage_count, int buffer_count, Pair neighbours>
struct ScaledConfig : Config<GroupedProduct::forward, columns, stage_count, buffer_count, neighbours> {
    static constexpr bool e5m2 = wide; // A is E5M2
    static constexpr int tile_k = 128;
    // Beside the sums of 256 columns there are registers for the products of half as many.
    static constexpr int passes = columns == 256 ? 2 : 1, width = columns / passes;
    static constexpr Work work = passes == 2 ? Work::in_passes : Work::streamed;
};

struct Scales { // [capacity, blocks] and [groups, columns of 128, blocks]
    const float *a, *b;
};

// The scales of a thread's elements: of its two rows and of the tile's columns, 64 of which at least have one. They are
// loaded a block ahead. Each of the four lanes that have the same rows loads those of other columns: what all lanes
// load from one place is waited for at once, to be kept in a register of the warp.
template <class C>
class ScalesOfTile {
public:
    static constexpr int pieces = C::tile_n % 128 == 0 ? C::tile_n / 128 : C::tile_n / 64;
    static constexpr int pieces_of_pass = pieces / C::passes;
    static_assert(pieces <= 4);

    // The scales of the tile's first block are on their way then.
    __device__ void begin(const Scales& scales, const Grouped& p, const Tile& tile, int consumer, int blocks) {
        const int lane = static_cast<int>(threadIdx.x % 128), last_row = p.capacity - 1;
        const int row = tile.routed + consumer * 64 + lane / warp_size * 16 + lane % warp_size / 4;
        const int piece = lane % 4 < pieces ? lane % 4 : pieces - 1, across = ceil_div(p.n, 128);
        const int column = (tile.col + piece * (C::tile_n / pieces)) / 128;
        rows_[0] = scales.a + std::int64_t{row < last_row ? row : last_row} * blocks;
        rows_[1] = scales.a + std::int64_t{row + 8 < last_row ? row + 8 : last_row} * blocks;
        columns_ = scales.b + (std::int64_t{tile.group} * across + (column < across ? column : across - 1)) * blocks;
        load(0);
    }
    __device__ void load(int block) { row_[0] = rows_[0][block], row_[1] = rows_[1][block], column_ = columns_[block]; }
    // The scales of the block that was loaded last, by columns and row.
    __device__ void products(int pass, float (&scale)[pieces_of_pass][2]) const {
#pragma unroll
        for (int i = 0; i < pieces_of_pass; ++i) {
            const float column = __shfl_sync(all_lanes, column_, pass * pieces_of_pass + i, 4);
            scale[i][0] = column * row_[0], scale[i][1] = column * row_[1];
        }
    }

private:
    const float *rows_[2], *columns_;
    float row_[2], column_;
};

// The stage of the block at this place of the ring, as soon as it has come. The address comes out of a reduction
// because that leaves it in a register of the warp: else every part of the descriptors would be brought there one by
// one, with the tensor cores idle.
template <class C>
__device__ unsigned await_block(const Shared<C>& shared, const Ring<C::stages>& at) {
    const unsigned stage = __reduce_max_sync(all_lanes, shared.a(at.stage));
    ptx::wait(shared.full(at.stage), at.parity);
    return stage;
}

// A block's products of one pass, under way when this returns, the last of them committed apart.
template <class C>
__device__ void issue_block(unsigned stage, int consumer, int pass, float (&part)[C::width / 2]) {
    const std::uint64_t a = ptx::describe<C::box_bytes>(stage + consumer * C::box_bytes);
    const std::uint64_t b = ptx::describe<C::box_bytes>(stage + C::a_boxes * C::box_bytes + pass * C::width * 128);
    ptx::fence_products();
#pragma unroll
    for (int i = 0; i < 3; ++i) ptx::multiply_f8<C::e5m2>(part, a + i * 2, b + i * 2, i); // 32 bytes further each time
    ptx::commit_products();
    ptx::multiply_f8<C::e5m2>(part, a + 6, b + 6, 1);
    ptx::commit_products();
}

// Multiplies tile by tile; a tile's sums are written while the first products of the next one are made. The block
// behind is awaited while products are made, so that only sums are added between these and the next.
template <class C>
__device__ void consume_scaled(const Maps& maps, const Grouped& p, const Scales& scales, const Shared<C>& shared,
                               int consumer, Dst c) {
    constexpr int count = C::width / 2, pieces = ScalesOfTile<C>::pieces_of_pass;
    const int blocks = ceil_div(p.depth, C::tile_k);
    Tiles<C> tiles(shared);
    Ring<C::stages> ring;
    Writer<C> writer(maps, p, shared, c, consumer);
    ScalesOfTile<C> ahead;
    Sums<C> sums;
    float part[count], scale[pieces][2];
    Tile tile, next, summed{-1}; // summed: the tile whose sums are to be written
    unsigned stage = 0;          // stage of the next products
    const auto find = [&](Tile& t, const Ring<C::stages>& at) {
        if (!tiles.next(t) || t.rows_left <= consumer * 64) return;
        ahead.begin(scales, p, t, consumer, blocks);
        stage = await_block<C>(shared, at);
    };
    const auto add = [&](int pass) {
        ptx::wait_products<0>();
        ptx::settle(part);
        if (pass + 1 == C::passes) release(shared, ring.stage), ring.advance();
#pragma unroll
        for (int i = 0; i < count; ++i) sums[0][pass * count + i] += part[i] * scale[i * pieces / count][i / 2 % 2];
    };
    // Computes the scales of these products, and loads what comes behind them.
    const auto prepare = [&](int block, int pass) {
        ahead.products(pass, scale);
        if (pass + 1 < C::passes) return;
        Ring<C::stages> behind = ring;
        behind.advance();
        if (block + 1 < blocks) {
            ahead.load(block + 1);
            stage = await_block<C>(shared, behind);
        } else {
            find(next, behind);
        }
    };
    for (find(tile, ring);; tile = next) {
        if (tile.group < 0 || tile.rows_left <= consumer * 64) { // The tile has nothing to multiply.
            if (summed.group >= 0) writer.write(summed, sums);
            if (tile.group < 0) break;
            summed.group = -1;
            skip_tile<C>(shared, ring, tile);
            find(next, ring);
            continue;
        }
#pragma unroll
        for (int pass = 0; pass < C::passes; ++pass) {
            issue_block<C>(stage, consumer, pass, part);
            if (summed.group >= 0) writer.template write<C::passes>(summed, sums, pass);
            prepare(0, pass);
#pragma unroll
            for (int i = 0; i < count; ++i) sums[0][pass * count + i] = 0.0f;
            add(pass);
        }
#pragma unroll 1
        for (int block = 1; block < blocks; ++block) {
#pragma unroll
            for (int pass = 0; pass < C::passes; ++pass) {
                issue_block<C>(stage, consumer, pass, part);
                prepare(block, pass);
                ptx::wait_products<1>(); // Waiting for the last apart is 1 to 3 % faster, as trials showed.
                add(pass);
            }
        }
        summed = tile;
    }
    writer.finish();
}

template <class C>
__global__ void __launch_bounds__(C::threads, 1)
    scaled_kernel(const __grid_constant__ Maps maps, Grouped p, Scales scales, Dst c) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ unsigned char memory[];
    run<C>(
        maps, p, memory, [&](const Shared<C>& shared, int rank) { produce<C>(maps, shared, rank); },
        [&](const Shared<C>& shared, int consumer) { consume_scaled<C>(maps, p, scales, shared, consumer, c); });
#endif
}

} // namespace moe::cuda::sm90
