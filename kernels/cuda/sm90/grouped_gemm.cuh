// The grouped product of BF16 operands on Hopper: copies by TMA, products by wgmma, one persistent CTA per SM.
//
// A CTA of three warpgroups: one thread of the first loads the operands of tiles of 128 x tile_n through a ring of
// stages, 64 contracted elements each; the other two multiply, 64 rows of a tile each. Two CTAs are a cluster of
// neighbouring tiles: half of the operand that they share is loaded by each and sent to both. Operands lie in shared
// memory as they are stored; the tensor cores transpose, so that one kernel serves forward, dgrad and wgrad.
//
// Groups begin at any row. A tile that crosses its group's end multiplies what lies there, and only stores less; in
// wgrad, where those rows would be added to every element, they are zeroed in shared memory.
//
// Where a tile has few products for its results, the two take whole tiles in turn, so that one's results leave while
// the other multiplies.
#pragma once

#include "kernels/cuda/ptx/wgmma.cuh"
#include "kernels/cuda/sm90/results.cuh"

namespace moe::cuda::sm90 {

// The boxes of one operand of one stage: of a shared one every second, to both CTAs.
template <bool transposed, int sharers, int boxes>
__device__ void load_operand(const CUtensorMap& map, int free, int depth, int plane, unsigned to, unsigned barrier,
                             int rank) {
#pragma unroll
    for (int i = 0; i < boxes; ++i) {
        const int at = free + i * 64;
        const ptx::Box box = transposed ? ptx::Box{at, depth, plane} : ptx::Box{depth, at, plane};
        if constexpr (sharers > 1) {
            if (i % sharers == rank) ptx::load_box(map, box, to + i * 8192, barrier, (1 << sharers) - 1);
        } else {
            ptx::load_box(map, box, to + i * 8192, barrier);
        }
    }
}

template <class C>
__device__ void produce(const Maps& maps, const Grouped& p, const Shared<C>& shared, typename C::Walk walk, int rank) {
    Ring<C::stages> ring;
    Tile tile;
    while (next_tile<C>(walk, p, rank, tile)) {
        const int a_free = C::wgrad ? tile.row : tile.routed, first = C::wgrad ? tile.routed : 0;
        for (int step = 0, k = 0; step < steps<C>(tile); ++step, k += C::tile_k, ring.advance()) {
            const unsigned full = shared.full(ring.stage);
            ptx::wait(shared.empty(ring.stage), ring.parity ^ 1);
            ptx::arrive_expecting(full, C::stage_bytes);
            load_operand<C::transposed_a, C::pair == Pair::along_n ? C::ctas : 1, C::a_boxes>(
                maps.a, a_free, first + k, 0, shared.a(ring.stage), full, rank);
            load_operand<C::transposed_b, C::pair == Pair::along_m ? C::ctas : 1, C::b_boxes>(
                maps.b, tile.col, first + k, C::wgrad ? 0 : tile.group, shared.b(ring.stage), full, rank);
        }
    }
}

// Both CTAs' producers wait for both CTAs' consumers: what one loads, it may send to the other.
template <class C>
__device__ void release(const Shared<C>& shared, int stage) {
    const unsigned lane = threadIdx.x % warp_size;
    if (lane < C::ctas) ptx::arrive_remote(ptx::in_cta(shared.empty(stage), lane));
}

// Zeroes the contracted elements of a stage from `depth` on in a warpgroup's operands, where they are rows of 128
// bytes. Two warpgroups that share a tile both do so with B, which spares them a barrier.
template <class C>
__device__ void zero_beyond(const Shared<C>& shared, int stage, int consumer, int depth) {
    constexpr int boxes = C::halves + C::b_boxes;
    const int thread = static_cast<int>(threadIdx.x % 128); // eight to a row
    const unsigned a = shared.a(stage) + (C::in_turn ? 0 : consumer * C::box_bytes), b = shared.b(stage);
    for (int row = depth + thread / 8; row < C::tile_k; row += 16) {
#pragma unroll
        for (int box = 0; box < boxes; ++box) {
            const unsigned base = box < C::halves ? a + box * C::box_bytes : b + (box - C::halves) * C::box_bytes;
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(base + row * C::row_bytes + thread % 8 * 16),
                         "r"(0)
                         : "memory");
        }
    }
    ptx::fence_async_proxy();
    ptx::sync_warpgroup(1 + consumer);
}

// The warpgroups' turns at the tensor cores. Those that take tiles in turn must take the ring's stages in turn, too: a
// phase of a barrier is known by its parity only, so that nobody may wait for a stage while an earlier round of it is
// still to come.
template <class C>
__device__ void await_turn(int consumer) {
    if (C::ordered) ptx::await_warpgroup(1 + C::consumers + consumer);
}
template <class C>
__device__ void give_turn(int consumer) {
    if (C::ordered) ptx::release_warpgroup(1 + C::consumers + consumer);
}

template <class C>
using Sums = float[C::halves][C::tile_n / 2]; // of a thread, by 64 rows of the tile

// The products of one tile, `halves` times 64 of its rows. One stage's are still computed while the next one's are
// issued; the first sets the sums.
template <class C, int halves>
__device__ void multiply_halves(const Shared<C>& shared, Ring<C::stages>& ring, const Tile& tile, int consumer,
                                Sums<C>& sum) {
    constexpr std::uint64_t a_step = ptx::k16_step<C::transposed_a>, b_step = ptx::k16_step<C::transposed_b>;
    int last = 0;
    for (int step = 0, k = 0; step < steps<C>(tile); ++step, k += C::tile_k, ring.advance()) {
        ptx::wait(shared.full(ring.stage), ring.parity);
        const int left = tile.depth - k;
        if (C::wgrad && left < C::tile_k) zero_beyond<C>(shared, ring.stage, consumer, left);
        const std::uint64_t a = ptx::describe(shared.a(ring.stage) + (C::in_turn ? 0 : consumer * C::box_bytes));
        const std::uint64_t b = ptx::describe(shared.b(ring.stage));
        ptx::fence_products();
#pragma unroll
        for (int i = 0; i < C::tile_k / 16; ++i) {
#pragma unroll
            for (int h = 0; h < halves; ++h) {
                ptx::multiply<C::transposed_a, C::transposed_b>(sum[h], a + h * ptx::next_box + i * a_step,
                                                                b + i * b_step, k + i);
            }
        }
        ptx::commit_products();
        ptx::wait_products<1>();
        if (k > 0) release(shared, last);
        last = ring.stage;
    }
    if (C::in_turn) give_turn<C>(consumer ^ 1); // all stages of the tile have come
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

// Where a warpgroup has no rows of the tile, it only lets the stages go.
template <class C>
__device__ void skip_tile(const Shared<C>& shared, Ring<C::stages>& ring, const Tile& tile) {
    for (int step = 0, k = 0; step < steps<C>(tile); ++step, k += C::tile_k, ring.advance()) {
        ptx::wait(shared.full(ring.stage), ring.parity);
        release(shared, ring.stage);
    }
}

// Multiplies tile by tile and writes the sums; `multiply` takes the stages of one tile. In turn, a warpgroup writes
// while the other multiplies.
template <class C, class Multiply>
__device__ void consume(const Maps& maps, const Grouped& p, const Shared<C>& shared, typename C::Walk walk, int rank,
                        int consumer, Dst c, const Multiply& multiply) {
    Ring<C::stages> ring;
    Writer<C> writer(maps, p, shared, c, consumer);
    Tile tile, following;
    Sums<C> sum;
    int turn = 0;
    if (consumer == 1) give_turn<C>(0);
    for (bool more = next_tile<C>(walk, p, rank, tile); more; tile = following, turn ^= 1) {
        more = next_tile<C>(walk, p, rank, following);
        if (C::in_turn && turn != consumer) {
            ring.skip(steps<C>(tile));
        } else if (tile.rows_left > (C::in_turn ? 0 : consumer * 64)) {
            writer.begin(tile);
            if (C::in_turn) await_turn<C>(consumer);
            multiply(shared, ring, tile, consumer, sum);
            writer.write(tile, sum);
        } else {
            if (C::in_turn) await_turn<C>(consumer);
            skip_tile<C>(shared, ring, tile);
            if (C::in_turn) give_turn<C>(consumer ^ 1);
        }
    }
    writer.finish();
}

// What the threads of a CTA do; all of them come.
template <class C, class Multiply>
__device__ void run(const Maps& maps, const Grouped& p, Dst c, const void* memory, const Multiply& multiply) {
    const Shared<C> shared(memory);
    const int rank = static_cast<int>(ptx::cluster_rank());
    const int warpgroup = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x / 128), 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < C::stages; ++i) {
            ptx::init_barrier(shared.full(i), 1);
            ptx::init_barrier(shared.empty(i), C::ctas * 4 * (C::in_turn ? 1 : C::consumers)); // the warps of all CTAs
        }
        for (int i = 0; i < C::consumers * C::buffers; ++i) ptx::init_barrier(shared.fetched(0, i), 1);
        ptx::fence_barrier_init();
        ptx::prefetch(maps.a), ptx::prefetch(maps.b), ptx::prefetch(maps.c);
    }
    ptx::cluster_sync();
    typename C::Walk walk(p, static_cast<int>(blockIdx.x / C::ctas), static_cast<int>(gridDim.x / C::ctas));
    if (warpgroup == 0) {
        ptx::give_registers<40>();
        if (threadIdx.x == 0) produce<C>(maps, p, shared, walk, rank);
        __syncwarp();
    } else {
        ptx::take_registers<232>();
        consume<C>(maps, p, shared, walk, rank, warpgroup - 1, c, multiply);
    }
    ptx::cluster_sync(); // the neighbour may still arrive here
}

template <class C>
__global__ void __launch_bounds__(C::threads, 1) grouped_kernel(const __grid_constant__ Maps maps, Grouped p, Dst c) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ unsigned char memory[];
    run<C>(maps, p, c, memory,
           [](const Shared<C>& shared, Ring<C::stages>& ring, const Tile& tile, int consumer, Sums<C>& sum) {
               multiply_tile<C>(shared, ring, tile, consumer, sum);
           });
#endif
}

} // namespace moe::cuda::sm90
