// A kind of tile of the grouped product: its sizes, its pieces of shared memory, and the corner of one in C.
#pragma once

#include "kernels/cuda/ptx/barrier.cuh"
#include "kernels/cuda/sm90/tiles.cuh"

#include <cuda.h>

namespace moe::cuda::sm90 {

enum class Pair : std::uint8_t { along_m, along_n };   // how the tiles of a cluster lie: they share B, or A
enum class Turns : std::uint8_t { together, in_turn }; // the warpgroups halve a tile, or take every second one
enum class Update : std::uint8_t { store, add };       // C =, or +=: fetched, added to in shared memory, stored

struct Maps { // planes: the groups of a weight or its gradient, one of routed rows
    CUtensorMap a, b, c;
};

// Shared memory holds `stages` of operands and, for each of the two warpgroups, `buffers` of 8 KiB of results.
template <GroupedProduct form, int columns, int stage_count, int buffer_count, Pair neighbours,
          Turns warpgroups = Turns::together, Update result = Update::store>
struct Config {
    static constexpr GroupedProduct product = form;
    static constexpr int tile_m = 128, tile_n = columns, tile_k = 64, stages = stage_count, buffers = buffer_count;
    static constexpr Pair pair = neighbours;
    static constexpr Update update = result;
    static constexpr int ctas = 2; // of a cluster
    static constexpr bool in_turn = warpgroups == Turns::in_turn;
    static constexpr bool ordered = in_turn;       // a warpgroup waits for the other one's products
    static constexpr int halves = in_turn ? 2 : 1; // of a tile's rows that a warpgroup computes
    static constexpr bool wgrad = form == GroupedProduct::wgrad;
    static constexpr bool transposed_a = wgrad, transposed_b = form != GroupedProduct::forward;
    static constexpr int box_bytes = 8192, a_boxes = tile_m / 64, b_boxes = tile_n / 64;
    static constexpr int stage_bytes = (a_boxes + b_boxes) * box_bytes;
    static constexpr int consumers = 2, threads = 128 * (1 + consumers);
    static constexpr int row_bytes = 128, result_columns = wgrad ? 32 : 64; // a buffer is 64 rows of 128 bytes
    static constexpr int parts = tile_n / result_columns;
    static constexpr int ring_bytes = stages * stage_bytes, result_bytes = consumers * buffers * box_bytes;
    static constexpr int barrier_bytes = 2 * stages * 8 + consumers * buffers * 8, alignment = 1024; // of the swizzle
    static constexpr int shared_bytes = alignment + ring_bytes + result_bytes + barrier_bytes;
    using Walk = Tiles<wgrad, update == Update::store, tile_m*(pair == Pair::along_m ? ctas : 1),
                       tile_n*(pair == Pair::along_n ? ctas : 1)>;
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
        return start + C::ring_bytes + consumer * C::buffers * C::box_bytes;
    }
    __device__ unsigned full(int stage) const { return start + C::ring_bytes + C::result_bytes + stage * 8; }
    __device__ unsigned empty(int stage) const { return full(C::stages + stage); }
    __device__ unsigned fetched(int consumer, int buffer) const {
        return full(2 * C::stages + consumer * C::buffers + buffer);
    }
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

struct Tile {            // of one CTA
    int group, row, col; // corner in the group's C
    int rows_left;       // of C from the corner on; none where the neighbour has the last tile
    int routed;          // first routed row: of the tile, or of the depth
    int depth;
};

// Stages of a tile: one, whose elements all lie beyond the depth, where there is no depth.
template <class C>
__device__ int steps(const Tile& tile) {
    return tile.depth > 0 ? ceil_div(tile.depth, C::tile_k) : 1;
}

template <class C>
__device__ bool next_tile(typename C::Walk& walk, const Grouped& p, int rank, Tile& tile) {
    ClusterTile t;
    if (!walk.next(t)) return false;
    const int row = t.row + (C::pair == Pair::along_m ? rank * C::tile_m : 0);
    const int col = t.col + (C::pair == Pair::along_n ? rank * C::tile_n : 0);
    const int rows_left = col < p.n ? (C::wgrad ? p.m : t.rows) - row : 0;
    tile = {t.group, row, col, rows_left, C::wgrad ? t.first_row : t.first_row + row, C::wgrad ? t.rows : p.depth};
    return true;
}

} // namespace moe::cuda::sm90
