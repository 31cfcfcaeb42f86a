// The grouped product of BF16 operands on Hopper: copies by TMA, products by wgmma, one persistent CTA per SM.
//
// A CTA of three warpgroups: one warp of the first finds the CTA's tiles, a thread of another loads their operands,
// 128 x tile_n at a time, through a ring of stages, 64 contracted elements each; the other two multiply, 64 rows of a
// tile each. Two CTAs are a cluster of neighbouring tiles: half of the operand that they share is loaded by each and
// sent to both. Operands lie in shared memory as they are stored; the tensor cores transpose, so that one kernel serves
// forward, dgrad and wgrad.
//
// Groups begin at any row. A tile that crosses its group's end multiplies what lies there, and only stores less; in
// wgrad, where those rows would be added to every element, the tensor map makes them zeros, and a tile's last step
// leaves out the products of nothing else.
//
// Where a tile has few products for its results, the two take whole tiles in turn, so that one's results leave while
// the other multiplies.
#pragma once

#include "kernels/cuda/ptx/wgmma.cuh"
#include "kernels/cuda/sm90/results.cuh"

namespace moe::cuda::sm90 {

// The boxes of one operand of one stage: of a shared one every second, to both CTAs. `box(i)` is the corner of the one
// that is 64 free elements further than the one before.
template <int sharers, int boxes, int box_bytes, class Box>
__device__ void load_operand(const CUtensorMap& map, Box box, unsigned to, unsigned barrier, int rank) {
#pragma unroll
    for (int i = 0; i < boxes; ++i) {
        if constexpr (sharers > 1) {
            if (i % sharers == rank) ptx::load_box(map, box(i * 64), to + i * box_bytes, barrier, (1 << sharers) - 1);
        } else {
            ptx::load_box(map, box(i * 64), to + i * box_bytes, barrier);
        }
    }
}

template <class C>
__device__ void produce(const Maps& maps, const Shared<C>& shared, int rank) {
    Tiles<C> tiles(shared);
    Ring<C::stages> ring;
    Tile tile;
    while (tiles.next(tile)) {
        for (int step = 0, k = 0; step < steps<C>(tile); ++step, k += C::tile_k, ring.advance()) {
            const unsigned full = shared.full(ring.stage);
            ptx::wait(shared.empty(ring.stage), ring.parity ^ 1);
            ptx::arrive_expecting(full, C::stage_bytes);
            load_operand<C::pair == Pair::along_n ? C::ctas : 1, C::a_boxes, C::box_bytes>(
                maps.a,
                [&](int i) {
                    if constexpr (C::wgrad)
                        return ptx::GroupBox{tile.row + i, tile.routed, tile.depth, k};
                    else
                        return ptx::Box{k, tile.routed + i, 0};
                },
                shared.a(ring.stage), full, rank);
            load_operand<C::pair == Pair::along_m ? C::ctas : 1, C::b_boxes, C::box_bytes>(
                maps.b,
                [&](int i) {
                    if constexpr (C::wgrad)
                        return ptx::GroupBox{tile.col + i, tile.routed, tile.depth, k};
                    else if constexpr (C::transposed_b)
                        return ptx::Box{tile.col + i, k, tile.group};
                    else
                        return ptx::Box{k, tile.col + i, tile.group};
                },
                shared.b(ring.stage), full, rank);
        }
    }
}

// Both CTAs' producers wait for both CTAs' consumers: what one loads, it may send to the other.
template <class C>
__device__ void release(const Shared<C>& shared, int stage) {
    const unsigned lane = threadIdx.x % warp_size;
    if (lane < C::ctas) ptx::arrive_remote(ptx::in_cta(shared.empty(stage), lane));
}

// The warpgroups' turns at the tensor cores. Those that take tiles in turn must take the ring's stages in turn, too: a
// phase of a barrier is known by its parity only, so that nobody may wait for a stage while an earlier round of it is
// still to come.
template <class C>
__device__ void await_turn(int consumer) {
    ptx::await_warpgroup(1 + C::consumers + consumer);
}
template <class C>
__device__ void give_turn(int consumer) {
    ptx::release_warpgroup(1 + C::consumers + consumer);
}

template <class C>
using Sums = float[C::halves][C::tile_n / 2]; // sums of a thread, by 64 rows of the tile

// The products of one tile, `halves` times 64 of its rows. One stage's are still computed while the next one's are
// issued; the first sets the sums. The last step of a gradient has products of 16 rows as far as there are any: a loop
// with the barriers of the other one, since the compiler would put the products in order otherwise.
template <class C, int halves>
__device__ void multiply_halves(const Shared<C>& shared, Ring<C::stages>& ring, const Tile& tile, int consumer,
                                Sums<C>& sum) {
    constexpr int slices = C::tile_k / 16;
    const int whole = C::wgrad ? tile.depth / C::tile_k : steps<C>(tile);
    const int rest = C::wgrad ? ceil_div(tile.depth % C::tile_k, 16) : 0;
    std::uint64_t a = 0, b = 0; // descriptors of the stage's operands
    int last = -1;              // stage whose products may be under way
    const auto await_stage = [&] {
        ptx::wait(shared.full(ring.stage), ring.parity);
        a = ptx::describe<C::box_bytes>(shared.a(ring.stage) + (C::in_turn ? 0 : consumer * C::box_bytes));
        b = ptx::describe<C::box_bytes>(shared.b(ring.stage));
    };
    const auto issue = [&](int slice, int add) {
#pragma unroll
        for (int h = 0; h < halves; ++h) {
            ptx::multiply<C::transposed_a, C::transposed_b>(
                sum[h], a + h * C::box_bytes / 16 + slice * ptx::k16_step<C::transposed_a>,
                b + slice * ptx::k16_step<C::transposed_b>, add);
        }
    };
#pragma unroll 1
    for (int step = 0; step < whole; ++step, ring.advance()) {
        await_stage();
        ptx::fence_products();
#pragma unroll
        for (int i = 0; i < slices; ++i) issue(i, step + i);
        ptx::commit_products();
        ptx::wait_products<1>();
        if (step > 0) release(shared, last);
        last = ring.stage;
    }
    if (C::wgrad && (rest > 0 || whole == 0)) {
        await_stage();
#pragma unroll 1
        for (int i = 0; i == 0 || i < rest; ++i) {
            ptx::fence_products();
            issue(i, whole + i);
            ptx::commit_products();
            ptx::wait_products<1>();
            if (i == 0 && whole > 0) release(shared, last);
        }
        last = ring.stage;
        ring.advance();
    }
    if (C::in_turn) give_turn<C>(consumer ^ 1); // All stages of the tile have come.
    ptx::wait_products<0>();
#pragma unroll
    for (int h = 0; h < halves; ++h) ptx::settle(sum[h]);
    release(shared, last);
}

template <class C>
__device__ void multiply_tile(const Shared<C>& shared, Ring<C::stages>& ring, const Tile& tile, int consumer,
                              Sums<C>& sum) {
    if (C::halves == 1 || tile.rows_left <= 64) {
        multiply_halves<C, 1>(shared, ring, tile, consumer, sum);
    } else {
        multiply_halves<C, C::halves>(shared, ring, tile, consumer, sum);
    }
}

// A warpgroup that has no rows of the tile only lets the stages go.
template <class C>
__device__ void skip_tile(const Shared<C>& shared, Ring<C::stages>& ring, const Tile& tile) {
    for (int step = 0, k = 0; step < steps<C>(tile); ++step, k += C::tile_k, ring.advance()) {
        ptx::wait(shared.full(ring.stage), ring.parity);
        release(shared, ring.stage);
    }
}

// Multiplies tile by tile and writes the sums. In turn, a warpgroup writes while the other multiplies.
template <class C>
__device__ void consume(const Maps& maps, const Grouped& p, const Shared<C>& shared, int consumer, Dst c) {
    Tiles<C> tiles(shared);
    Ring<C::stages> ring;
    Writer<C> writer(maps, p, shared, c, consumer);
    Tile tile;
    Sums<C> sum;
    if (C::in_turn && consumer == 1) give_turn<C>(0);
    for (int turn = 0; tiles.next(tile); turn ^= 1) {
        if (C::in_turn && turn != consumer) {
            ring.skip(steps<C>(tile));
        } else if (tile.rows_left > (C::in_turn ? 0 : consumer * 64)) {
            writer.begin(tile);
            if (C::in_turn) await_turn<C>(consumer);
            multiply_tile<C>(shared, ring, tile, consumer, sum);
            writer.write(tile, sum);
        } else {
            if (C::in_turn) await_turn<C>(consumer);
            skip_tile<C>(shared, ring, tile);
            if (C::in_turn) give_turn<C>(consumer ^ 1);
        }
    }
    writer.finish();
}

// The work of the threads of a CTA; all of them come: produce(shared, rank) in one thread, consume(shared, consumer) in
// two warpgroups.
template <class C, class Produce, class Consume>
__device__ void run(const Maps& maps, const Grouped& p, const void* memory, const Produce& produce,
                    const Consume& consume) {
    const Shared<C> shared(memory);
    const int rank = static_cast<int>(ptx::cluster_rank());
    const int warpgroup = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x / 128), 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::stages; ++i) {
            ptx::init_barrier(shared.full(i), 1);
            ptx::init_barrier(shared.empty(i), C::ctas * 4 * (C::in_turn ? 1 : C::consumers)); // warps of all CTAs
        }
        for (int i = 0; i < C::consumers * C::buffers; ++i) ptx::init_barrier(shared.fetched(0, i), 1);
        for (int i = 0; i < C::tiles; ++i) {
            ptx::init_barrier(shared.announced(i), 1);
            ptx::init_barrier(shared.taken(i), C::readers);
            ptx::init_barrier(shared.claimed(i), 1), ptx::init_barrier(shared.heard(i), 1);
        }
        ptx::fence_barrier_init();
        ptx::prefetch(maps.a), ptx::prefetch(maps.b), ptx::prefetch(maps.c);
    }
    ptx::cluster_sync();
    if (warpgroup == 0) {
        ptx::give_registers<40>();
        if (threadIdx.x == 0) produce(shared, rank);
        if (threadIdx.x / warp_size == 1) announce<C>(p, shared, rank);
        __syncwarp();
    } else {
        ptx::take_registers<232>();
        consume(shared, warpgroup - 1);
    }
    ptx::cluster_sync(); // The neighbour may still arrive here.
}

template <class C>
__global__ void __launch_bounds__(C::threads, 1) grouped_kernel(const __grid_constant__ Maps maps, Grouped p, Dst c) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ unsigned char memory[];
    run<C>(
        maps, p, memory, [&](const Shared<C>& shared, int rank) { produce<C>(maps, shared, rank); },
        [&](const Shared<C>& shared, int consumer) { consume<C>(maps, p, shared, consumer, c); });
#endif
}

} // namespace moe::cuda::sm90
