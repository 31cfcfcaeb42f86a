// The gradient of weights from columns of scaled E4M3, or E5M2 by E4M3, on Hopper: the frame of grouped_gemm.cuh, other
// products.
//
// Both operands lie in blocks of 128 contracted rows, whose columns have a scale each, so that a box of 64 columns of a
// block is 8 KiB side by side. The tensor cores add up a block; each sum is multiplied by the scales of its row and its
// column and added to the tile's in FP32 registers, while the other warpgroup multiplies. The scales come to shared
// memory with their block. FP32 results leave beside the products of the next tile.
#pragma once

#include "kernels/cuda/sm90/scaled_gemm.cuh"

namespace moe::cuda::sm90 {

// `low`: results in BF16; `wide`: A is E5M2.
template <int columns, int stage_count, int buffer_count, Pair neighbours, Update result, bool low, bool wide>
struct ScaledGradientConfig
    : Config<GroupedProduct::wgrad, columns, stage_count, buffer_count, neighbours, Turns::together, result> {
    using Base = Config<GroupedProduct::wgrad, columns, stage_count, buffer_count, neighbours, Turns::together, result>;
    static constexpr int tile_k = 128;
    static constexpr bool narrow = low, e5m2 = wide;
    static constexpr int result_columns = low ? 64 : 32, parts = columns / result_columns;
    // Beside the sums of 256 columns there are registers for the products of half as many.
    static constexpr int passes = columns == 256 ? 2 : 1, width = columns / passes;
    static constexpr Work work = passes == 2 ? Work::in_passes : Work::streamed;
    // The scales of a stage, of the tile's rows and its columns, lie behind all else.
    static constexpr int scale_bytes = (Base::tile_m + columns) * 4;
    static constexpr int barriers_end = Base::shared_bytes - Base::alignment;
    static constexpr int scales_at = (barriers_end + 15) / 16 * 16;
    static constexpr int shared_bytes = Base::alignment + scales_at + stage_count * scale_bytes;
    using Walk = DepthTiles<result == Update::store, Base::cluster_m, Base::cluster_n, tile_k>;
};

// The columns' scales of both operands, [blocks, m] and [blocks, n].
struct ColumnScales {
    const float *a, *b;
};

template <class C>
__device__ unsigned scales_of(const Shared<C>& shared, int stage) {
    return shared.start + C::scales_at + stage * C::scale_bytes;
}

template <class C>
__device__ int blocks_of(const Tile& tile) {
    return ceil_div(tile.depth, C::tile_k);
}

__device__ inline int scales_within(int left, int most) { return left <= 0 ? 0 : left < most ? left : most; }

template <class C>
__device__ void produce_columns(const Maps& maps, const Grouped& p, const ColumnScales& scales, const Shared<C>& shared,
                                int rank) {
    Tiles<C> tiles(shared);
    Ring<C::stages> ring;
    Tile tile;
    while (tiles.next(tile)) {
        const int blocks = blocks_of<C>(tile), first = tile.routed / C::tile_k;
        const unsigned a_bytes = scales_within(p.m - tile.row, C::tile_m) * 4,
                       b_bytes = scales_within(p.n - tile.col, C::tile_n) * 4;
        const float* a_scale = scales.a + std::int64_t{first} * p.m + tile.row;
        const float* b_scale = scales.b + std::int64_t{first} * p.n + tile.col;
        for (int block = 0; block < blocks; ++block, ring.advance(), a_scale += p.m, b_scale += p.n) {
            const unsigned full = shared.full(ring.stage), to = scales_of<C>(shared, ring.stage);
            ptx::wait(shared.empty(ring.stage), ring.parity ^ 1);
            ptx::arrive_expecting(full, C::stage_bytes + a_bytes + b_bytes);
            load_operand<C::pair == Pair::along_n ? C::ctas : 1, C::a_boxes, C::box_bytes>(
                maps.a,
                [&](int i) {
                    return ptx::Box{0, tile.row + i, first + block};
                },
                shared.a(ring.stage), full, rank);
            load_operand<C::pair == Pair::along_m ? C::ctas : 1, C::b_boxes, C::box_bytes>(
                maps.b,
                [&](int i) {
                    return ptx::Box{0, tile.col + i, first + block};
                },
                shared.b(ring.stage), full, rank);
            if (a_bytes > 0) ptx::load_bytes(to, a_scale, a_bytes, full);
            if (b_bytes > 0) ptx::load_bytes(to + C::tile_m * 4, b_scale, b_bytes, full);
        }
    }
}

// A warpgroup that has nothing to multiply of the tile only lets the stages go.
template <class C>
__device__ void skip_blocks(const Shared<C>& shared, Ring<C::stages>& ring, const Tile& tile) {
    for (int block = 0; block < blocks_of<C>(tile); ++block, ring.advance()) {
        ptx::wait(shared.full(ring.stage), ring.parity);
        release(shared, ring.stage);
    }
}

__device__ inline float read_float(unsigned address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}
__device__ inline float2 read_two(unsigned address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address) : "memory");
    return x;
}

// Multiplies tile by tile. A tile's sums are written while the first products of the next one are made, and what those
// are added to is fetched behind that.
template <class C>
__device__ void consume_columns(const Maps& maps, const Grouped& p, const Shared<C>& shared, int consumer, Dst c) {
    constexpr int count = C::width / 2;
    const int lane = static_cast<int>(threadIdx.x % 128);
    // Where the thread's scales lie in a stage's: of its first row, eight before the second, and of its first columns.
    const unsigned row_at = (consumer * 64 + lane / warp_size * 16 + lane % warp_size / 4) * 4,
                   column_at = (C::tile_m + lane % 4 * 2) * 4;
    Tiles<C> tiles(shared);
    Ring<C::stages> ring;
    Writer<C> writer(maps, p, shared, c, consumer);
    Sums<C> sums;
    float part[count];
    Tile tile, next, summed{-1}; // summed: the tile whose sums are to be written
    unsigned stage = 0;          // stage of the next products
    const auto find = [&](Tile& t, const Ring<C::stages>& at) {
        if (tiles.next(t) && t.rows_left > consumer * 64 && t.depth > 0) stage = await_block<C>(shared, at);
    };
    const auto prepare = [&](int block, int blocks, int pass) {
        if (pass + 1 < C::passes) return;
        Ring<C::stages> behind = ring;
        behind.advance();
        if (block + 1 < blocks) {
            stage = await_block<C>(shared, behind);
        } else {
            find(next, behind);
        }
    };
    const auto add = [&](int pass) {
        const unsigned scales = scales_of<C>(shared, ring.stage);
        const float low = read_float(scales + row_at), high = read_float(scales + row_at + 32);
        ptx::wait_products<0>();
        ptx::settle(part);
#pragma unroll
        for (int i = 0; i < count; i += 4) {
            const float2 column = read_two(scales + column_at + (pass * C::width + i * 2) * 4);
            float* const sum = sums[0] + pass * count + i;
            sum[0] += part[i] * (low * column.x), sum[1] += part[i + 1] * (low * column.y);
            sum[2] += part[i + 2] * (high * column.x), sum[3] += part[i + 3] * (high * column.y);
        }
        if (pass + 1 < C::passes) return;
        __syncwarp(); // All lanes have their scales.
        release(shared, ring.stage);
        ring.advance();
    };
    const auto clear = [&](int pass) {
#pragma unroll
        for (int i = 0; i < count; ++i) sums[0][pass * count + i] = 0.0f;
    };
    for (find(tile, ring);; tile = next) {
        const int blocks = blocks_of<C>(tile);
        if (tile.group < 0 || tile.rows_left <= consumer * 64 || blocks == 0) { // There is nothing to multiply.
            if (summed.group >= 0) writer.write(summed, sums);
            if (tile.group < 0) break;
            summed.group = -1;
            skip_blocks<C>(shared, ring, tile);
            // A group without rows has gradients of zero. Where C is added to, it keeps what it has: nothing of it has
            // been fetched.
            if (C::update == Update::store && tile.rows_left > consumer * 64) {
#pragma unroll
                for (int pass = 0; pass < C::passes; ++pass) clear(pass);
                summed = tile;
            }
            find(next, ring);
            continue;
        }
#pragma unroll
        for (int pass = 0; pass < C::passes; ++pass) {
            issue_block<C>(stage, consumer, pass, part);
            if (summed.group >= 0) writer.template write<C::passes>(summed, sums, pass);
            if (pass + 1 == C::passes) writer.begin(tile);
            prepare(0, blocks, pass);
            clear(pass);
            add(pass);
        }
#pragma unroll 1
        for (int block = 1; block < blocks; ++block) {
#pragma unroll
            for (int pass = 0; pass < C::passes; ++pass) {
                issue_block<C>(stage, consumer, pass, part);
                prepare(block, blocks, pass);
                add(pass);
            }
        }
        summed = tile;
    }
    writer.finish();
}

template <class C>
__global__ void __launch_bounds__(C::threads, 1)
    scaled_wgrad_kernel(const __grid_constant__ Maps maps, Grouped p, ColumnScales scales, Dst c) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ unsigned char memory[];
    run<C>(
        maps, p, memory, [&](const Shared<C>& shared, int rank) { produce_columns<C>(maps, p, scales, shared, rank); },
        [&](const Shared<C>& shared, int consumer) { consume_columns<C>(maps, p, shared, consumer, c); });
#endif
}

} // namespace moe::cuda::sm90
