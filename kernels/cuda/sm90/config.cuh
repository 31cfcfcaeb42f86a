// A kind of tile of the grouped product: its sizes, its pieces of shared memory, how a CTA's warps hear of theirs.
#pragma once

#include "kernels/cuda/ptx/barrier.cuh"
#include "kernels/cuda/sm90/tiles.cuh"
#include "kernels/tiles.hpp"

#include <cuda.h>

#include <type_traits>

namespace moe::cuda::sm90 {

enum class Pair : std::uint8_t { along_m, along_n };   // The tiles of a cluster share B, or A.
enum class Turns : std::uint8_t { together, in_turn }; // The warpgroups halve a tile, or take every second one.
enum class Update : std::uint8_t { store, add };       // C =, or +=: fetched, added to in shared memory, stored
enum class Sides : std::uint8_t { given, swapped };    // Swapped operands make C of a gradient transposed.

inline constexpr int gradient_k = 64; // contracted elements of a gradient's stage

struct Maps { // maps with a plane for each group of a weight or its gradient, or one of routed rows
    CUtensorMap a, b, c;
};

// Shared memory holds `stages` of operands and, for each of the two warpgroups, `buffers` of 8 KiB of results: of 64
// rows of 128 bytes, or, where an FP32 gradient's sides are swapped, of twice 32. `low`: results in BF16, else in FP32.
template <GroupedProduct form, int columns, int stage_count, int buffer_count, Pair neighbours,
          Turns warpgroups = Turns::together, Update result = Update::store, Sides operands = Sides::given,
          bool low = form != GroupedProduct::wgrad>
struct Config {
    static constexpr GroupedProduct product = form;
    static constexpr int tile_m = 128, tile_n = columns, stages = stage_count, buffers = buffer_count;
    static constexpr Pair pair = neighbours;
    static constexpr Update update = result;
    static constexpr int ctas = 2; // CTAs of a cluster
    static constexpr bool in_turn = warpgroups == Turns::in_turn;
    static constexpr int halves = in_turn ? 2 : 1; // halves of a tile's rows that a warpgroup computes
    static constexpr Work work = in_turn ? Work::in_turn : Work::together;
    static constexpr bool wgrad = form == GroupedProduct::wgrad;
    static constexpr bool swapped = operands == Sides::swapped;
    static constexpr bool transposed_a = wgrad, transposed_b = form != GroupedProduct::forward;
    static constexpr int tile_k = wgrad ? gradient_k : 64; // contracted elements of a stage
    static constexpr int box_bytes = tile_k * 128, a_boxes = tile_m / 64, b_boxes = tile_n / 64;
    static constexpr int stage_bytes = (a_boxes + b_boxes) * box_bytes;
    static constexpr int consumers = 2, threads = 128 * (1 + consumers), readers = 1 + 128 * consumers;
    static constexpr bool narrow = low;
    static constexpr int buffer_bytes = 8192, result_columns = narrow ? 64 : 32;
    static constexpr int parts = tile_n / result_columns;
    static constexpr int ring_bytes = stages * stage_bytes, result_bytes = consumers * buffers * buffer_bytes;
    // Tiles announced ahead of their products, each with a place of 8 bytes for the claim that the pair's other CTA
    // hears.
    static constexpr int tiles = 2, tile_bytes = 32, claim_bytes = 8;
    static constexpr int barrier_bytes = 2 * stages * 8 + consumers * buffers * 8 + 4 * tiles * 8;
    static constexpr int alignment = 1024; // alignment that the swizzle needs
    static constexpr int shared_bytes =
        alignment + ring_bytes + result_bytes + tiles * (tile_bytes + claim_bytes) + barrier_bytes;
    static constexpr int cluster_m = tile_m * (pair == Pair::along_m ? ctas : 1);
    static constexpr int cluster_n = tile_n * (pair == Pair::along_n ? ctas : 1);
    using Walk = std::conditional_t<wgrad, DepthTiles<update == Update::store, cluster_m, cluster_n>,
                                    RowTiles<cluster_m, cluster_n>>;
};

// Addresses in shared memory; the same in both CTAs of a cluster.
template <class C>
struct Shared {
    unsigned start;
    __device__ explicit Shared(const void* memory)
        : start((ptx::shared_address(memory) + C::alignment - 1) / C::alignment * C::alignment) {}
    __device__ unsigned a(int stage) const { return start + stage * C::stage_bytes; }
    __device__ unsigned b(int stage) const { return a(stage) + C::a_boxes * C::box_bytes; }
    __device__ unsigned results(int consumer) const {
        return start + C::ring_bytes + consumer * C::buffers * C::buffer_bytes;
    }
    __device__ unsigned tile(int i) const { return start + C::ring_bytes + C::result_bytes + i * C::tile_bytes; }
    __device__ unsigned claim(int i) const { return tile(C::tiles) + i * C::claim_bytes; }
    __device__ unsigned full(int stage) const { return claim(C::tiles) + stage * 8; }
    __device__ unsigned empty(int stage) const { return full(C::stages + stage); }
    __device__ unsigned fetched(int consumer, int buffer) const {
        return full(2 * C::stages + consumer * C::buffers + buffer);
    }
    __device__ unsigned announced(int tile) const { return fetched(C::consumers, tile); }
    __device__ unsigned taken(int tile) const { return announced(C::tiles + tile); }
    __device__ unsigned claimed(int tile) const { return taken(C::tiles + tile); }
    __device__ unsigned heard(int tile) const { return claimed(C::tiles + tile); }
};

template <int stages>
struct Ring { // position in the stages; the parity turns with every round
    int stage = 0;
    unsigned parity = 0;
    __device__ void advance() {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
    __device__ void skip(int steps) {
        const int to = stage + steps;
        stage = to % stages, parity ^= static_cast<unsigned>(to / stages) & 1;
    }
};

struct Tile {            // tile of one CTA
    int group, row, col; // corner in the group's C; no group: there is no tile
    int rows_left;       // rows of C from the corner on; none where the neighbour has the last tile
    int routed;          // first routed row of the tile, or of the depth
    int depth;
};

// Stages of a tile: one, whose elements all lie beyond the depth, where there is no depth.
template <class C>
__device__ int steps(const Tile& tile) {
    return tile.depth > 0 ? ceil_div(tile.depth, C::tile_k) : 1;
}

template <class C>
__device__ Tile tile_at(int index, typename C::Walk& walk, const Grouped& p, int rank) {
    ClusterTile t;
    if (!walk.at(index, t)) return {-1};
    const int row = t.row + (C::pair == Pair::along_m ? rank * C::tile_m : 0);
    const int col = t.col + (C::pair == Pair::along_n ? rank * C::tile_n : 0);
    const int rows_left = col < p.n ? (C::wgrad ? p.m : t.rows) - row : 0;
    return {t.group, row, col, rows_left, C::wgrad ? t.first_row : t.first_row + row, C::wgrad ? t.rows : p.depth};
}

// The next tile that no cluster has: the first CTA claims it and tells the other, which says that it has heard.
template <class C>
__device__ int claim(const Grouped& p, const Shared<C>& shared, const Ring<C::tiles>& at, int rank, int clusters) {
    int index = 0;
    if (threadIdx.x % warp_size == 0) {
        if (rank == 0) {
            index = clusters + atomicAdd(p.claims, 1);
            ptx::wait(shared.heard(at.stage), at.parity ^ 1);
            ptx::send(ptx::in_cta(shared.claim(at.stage), 1), {__int_as_float(index), 0.0f},
                      ptx::in_cta(shared.claimed(at.stage), 1));
        } else {
            ptx::arrive_expecting(shared.claimed(at.stage), C::claim_bytes);
            ptx::wait(shared.claimed(at.stage), at.parity);
            index = __float_as_int(ptx::read_remote(ptx::in_cta(shared.claim(at.stage), 1)).x);
            ptx::arrive_remote(ptx::in_cta(shared.heard(at.stage), 0));
        }
    }
    return __shfl_sync(all_lanes, index, 0);
}

// One warp finds the CTA's tiles, which takes it a microsecond each, and tells the others ahead of time. A cluster
// claims a tile when it has room for it, so that those that run at a time are neighbours, whose operands are in L2:
// where each had its own from the start, clusters drifted apart and read them again. The last claim of all, as many as
// there are tiles in all, leaves none.
template <class C>
__device__ void announce(const Grouped& p, const Shared<C>& shared, int rank) {
    const int cluster = static_cast<int>(blockIdx.x / C::ctas), clusters = static_cast<int>(gridDim.x / C::ctas);
    const bool speaks = threadIdx.x % warp_size == 0;
    typename C::Walk walk(p);
    Ring<C::tiles> at, claims;
    int index = cluster; // The first tile is the cluster's own.
    for (;; claims.advance()) {
        const Tile tile = tile_at<C>(index, walk, p, rank);
        if (speaks) {
            ptx::write_shared(shared.tile(at.stage), int4{tile.group, tile.row, tile.col, tile.rows_left});
            ptx::write_shared(shared.tile(at.stage) + 16, int4{tile.routed, tile.depth, 0, 0});
            ptx::arrive(shared.announced(at.stage));
        }
        if (tile.group < 0) break;
        at.advance();
        if (speaks) ptx::wait(shared.taken(at.stage), at.parity ^ 1);
        index = claim<C>(p, shared, claims, rank, clusters);
    }
    if (speaks && rank == 0 && index - clusters == walk.count() - 1) *p.claims = 0;
}

// The tiles as a reader has seen them.
template <class C>
class Tiles {
public:
    __device__ explicit Tiles(const Shared<C>& shared) : shared_(shared) {}
    __device__ bool next(Tile& tile) {
        ptx::wait(shared_.announced(at_.stage), at_.parity);
        const int4 low = ptx::read_shared(shared_.tile(at_.stage)),
                   high = ptx::read_shared(shared_.tile(at_.stage) + 16);
        tile = {low.x, low.y, low.z, low.w, high.x, high.y};
        ptx::arrive(shared_.taken(at_.stage));
        at_.advance();
        return tile.group >= 0;
    }

private:
    const Shared<C>& shared_;
    Ring<C::tiles> at_;
};

} // namespace moe::cuda::sm90
