// The tiles of a grouped product in the order in which clusters take them, from row counts that only the device knows.
#pragma once

#include "kernels/cuda/device.cuh"

#include <climits>

namespace moe::cuda::sm90 {

// A grouped product as its C has it: C_e[m, n] over `depth` contracted elements. The count of a group's rows is m
// (forward, dgrad) or the depth (wgrad); what is not known is 0.
struct Grouped {
    int groups = 0, m = 0, n = 0, depth = 0, capacity = 0;
    const std::int32_t* counts = nullptr; // counts of rows by group; null: all rows are of the one group
    int* claims = nullptr;                // tiles that clusters have asked for; 0 before and behind the product
};

struct ClusterTile {
    int group;     // group of B (forward, dgrad) or C (wgrad)
    int first_row; // first row of the group among all routed rows
    int rows;      // rows of the group
    int row, col;  // corner in the group's C
};

// The place of a tile: down bands of 16 tiles of rows, column by column, so that those that run side by side share
// their operands in L2.
template <int tile_m, int tile_n>
__device__ void place_in_bands(int local, int down, int across, ClusterTile& tile) {
    constexpr int band = 16;
    const int top = local / (band * across) * band;
    const int height = down - top < band ? down - top : band, in_band = local - top * across;
    tile.row = (top + in_band % height) * tile_m, tile.col = in_band / height * tile_n;
}

// Forward, dgrad: the tiles of one group after the other, a group's last rows last.
template <int tile_m, int tile_n>
class RowTiles {
public:
    static constexpr int rows = tile_m, columns = tile_n;

    __device__ explicit RowTiles(const Grouped& product) : p_(product), across_(ceil_div(product.n, tile_n)) {}

    // The tile of an index that is not below the last one asked for; false behind the last tile.
    __device__ bool at(int index, ClusterTile& tile) {
        for (; group_ < p_.groups; ++group_) {
            const int left = p_.capacity - first_row_, count = p_.counts == nullptr ? left : p_.counts[group_];
            const int m = count < 0 ? 0 : count < left ? count : left;
            const int down = ceil_div(m, tile_m), tiles = down * across_;
            if (index < first_tile_ + tiles) {
                tile = {group_, first_row_, m, 0, 0};
                place_in_bands<tile_m, tile_n>(index - first_tile_, down, across_, tile);
                return true;
            }
            first_tile_ += tiles;
            first_row_ += m;
        }
        return false;
    }
    __device__ int count() const { return first_tile_; } // all tiles, behind the last

private:
    const Grouped& p_;
    int across_, group_ = 0, first_row_ = 0, first_tile_ = 0;
};

// wgrad: every group has the same tiles, as deep as it has rows. Those of the group with the most rows come first, so
// that the last are short. Where C is added to, groups without rows (`without_depth`) have no tiles. Each group's rows
// begin at a multiple of `unit`, in operands whose groups are filled up. A whole warp asks at once.
template <bool without_depth, int tile_m, int tile_n, int unit = 1>
class DepthTiles {
public:
    static constexpr int rows = tile_m, columns = tile_n;

    __device__ explicit DepthTiles(const Grouped& product)
        : p_(product), down_(ceil_div(product.m, tile_m)), across_(ceil_div(product.n, tile_n)) {}

    __device__ bool at(int index, ClusterTile& tile) {
        for (; index >= end_; end_ += down_ * across_) {
            if (!next_group()) return false;
        }
        tile = {group_, first_row_, rows_, 0, 0};
        place_in_bands<tile_m, tile_n>(index - (end_ - down_ * across_), down_, across_, tile);
        return true;
    }
    __device__ int count() const { return end_; }

private:
    // The one of the largest count that comes behind the last one, of equal counts the first.
    __device__ bool next_group() {
        const int lane = static_cast<int>(threadIdx.x % warp_size);
        int most = -1, at = p_.groups;
        for (int e = lane; e < p_.groups; e += warp_size) {
            const int count = count_of(e);
            const bool behind = count < count_ || (count == count_ && e > group_);
            if (behind && count > most) most = count, at = e;
        }
        count_ = __reduce_max_sync(all_lanes, most);
        if (count_ < (without_depth ? 0 : 1)) return false;
        group_ = __reduce_min_sync(all_lanes, most == count_ ? at : p_.groups);
        int before = 0, units = 0;
        for (int e = lane; e < group_; e += warp_size) before += count_of(e), units += ceil_div(count_of(e), unit);
        before = __reduce_add_sync(all_lanes, before);
        before = before < p_.capacity ? before : p_.capacity;
        rows_ = count_ < p_.capacity - before ? count_ : p_.capacity - before;
        first_row_ = unit == 1 ? before : __reduce_add_sync(all_lanes, units) * unit;
        return true;
    }
    __device__ int count_of(int e) const {
        const int count = p_.counts == nullptr ? p_.capacity : p_.counts[e];
        return count > 0 ? count : 0;
    }

    const Grouped& p_;
    int down_, across_, end_ = 0; // tiles of a group, and up to the end of the present one
    int group_ = -1, count_ = INT_MAX, first_row_ = 0, rows_ = 0;
};

} // namespace moe::cuda::sm90
