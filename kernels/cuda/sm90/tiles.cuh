// Which tile of a grouped product a cluster computes next, from row counts that only the device knows.
#pragma once

#include "kernels/cuda/device.cuh"

namespace moe::cuda::sm90 {

// A grouped product as its C has it: C_e[m, n] over `depth` contracted elements. The count of a group's rows is m
// (forward, dgrad) or the depth (wgrad); what is not known is 0.
struct Grouped {
    int groups = 0, m = 0, n = 0, depth = 0, capacity = 0;
    const std::int32_t* counts = nullptr; // null: all rows are of the one group
};

struct ClusterTile {
    int group;     // the group's B (forward, dgrad) or C (wgrad)
    int first_row; // of the group among all routed rows
    int rows;      // of the group
    int row, col;  // corner in the group's C
};

// The clusters take turns at the groups' tiles, so that those that run side by side share their operands in L2: down
// bands of `band` tiles of rows, column by column. Tiles at a group's end with no more rows than one warpgroup takes
// cost about half; the clusters take turns at those separately, in the other direction, and stay level. Where C is
// added to, a group without rows (`without_depth`) has no tiles.
template <bool rows_are_depth, bool without_depth, int tile_m, int tile_n>
class Tiles {
public:
    static constexpr int rows = tile_m, columns = tile_n;

    __device__ Tiles(const Grouped& product, int cluster, int clusters)
        : p_(product),
          across_(ceil_div(product.n, tile_n)),
          stride_(clusters),
          tile_(cluster),
          short_tile_(clusters - 1 - cluster) {}

    __device__ bool next(ClusterTile& tile) {
        for (; group_ < p_.groups; ++group_) {
            const int left = p_.capacity - first_row_, count = p_.counts == nullptr ? left : p_.counts[group_];
            const int routed = count < 0 ? 0 : count < left ? count : left;
            const int m = !rows_are_depth ? routed : routed > 0 || without_depth ? p_.m : 0;
            const bool ends_short = m % tile_m != 0 && m % tile_m <= 64;
            const int down = ends_short ? m / tile_m : ceil_div(m, tile_m);
            const int tiles = down * across_, short_tiles = ends_short ? across_ : 0;
            if (tile_ < first_tile_ + tiles) {
                const int local = tile_ - first_tile_, top = local / (band * across_) * band;
                const int height = down - top < band ? down - top : band, in_band = local - top * across_;
                tile = {group_, first_row_, routed, (top + in_band % height) * tile_m, in_band / height * tile_n};
                tile_ += stride_;
                return true;
            }
            if (short_tile_ < first_short_ + short_tiles) {
                tile = {group_, first_row_, routed, down * tile_m, (short_tile_ - first_short_) * tile_n};
                short_tile_ += stride_;
                return true;
            }
            first_tile_ += tiles;
            first_short_ += short_tiles;
            first_row_ += routed;
        }
        return false;
    }

private:
    static constexpr int band = 16;
    const Grouped& p_;
    int across_, stride_, tile_, short_tile_;
    int group_ = 0, first_row_ = 0, first_tile_ = 0, first_short_ = 0;
};

} // namespace moe::cuda::sm90
