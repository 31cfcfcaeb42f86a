// The kinds of tiles that Hopper's grouped products choose from, and how long a product takes on one: the kernels'
// launch chooses by it (kernels/cuda/sm90/launch.cuh), calibration writes it into the profile that prices them.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

namespace moe {

// A cluster of two CTAs, each on a multiprocessor of its own.
inline constexpr int tile_multiprocessors = 2;

// The tile that a cluster computes at once, in steps along the contraction.
struct TileKind {
    int down, across;     // tile's rows and columns of a group's C
    int depth;            // contracted elements of a step
    double step_cycles;   // cycles of the tensor cores, and of issuing what they do
    double tile_cycles;   // cycles of a tile's start and its results, where nothing hides them
    bool swapped = false; // C of a gradient is computed transposed
    bool operator==(const TileKind&) const = default;
};

// The ways in which the two warpgroups of a CTA work: together on a tile, whose start and end nothing hides; in turn on
// tiles of their own; or together, one tile's results written beside the next one's first products, of all columns at
// once or in two passes.
enum class Work { together, in_turn, streamed, in_passes };

// A CTA's 128 rows x `columns`; 128 rows x 1 column x 64 elements of BF16, or 128 of E4M3, are 4 cycles of an SM's
// tensor cores. The other figures are fitted to an H200's times.
constexpr TileKind tile_kind(int down, int across, int columns, int depth, Work work, bool swapped = false) {
    const double issue_cycles = work == Work::in_turn ? 104.0 : work == Work::in_passes ? 48.0 : 64.0;
    return {down, across, depth, 4.0 * columns + issue_cycles, work == Work::together ? 2700.0 : 0.0, swapped};
}

// Tiles of products of routed rows (forward, dgrad), of their weights' gradients, of rows and weights in E4M3, and
// of gradients from columns in E4M3.
inline constexpr std::array<TileKind, 3> row_tiles{tile_kind(128, 512, 256, 64, Work::together),
                                                   tile_kind(128, 384, 192, 64, Work::in_turn),
                                                   tile_kind(128, 256, 128, 64, Work::together)};
inline constexpr std::array<TileKind, 3> gradient_tiles{tile_kind(256, 192, 192, 64, Work::in_turn),
                                                        tile_kind(256, 192, 192, 64, Work::in_turn, true),
                                                        tile_kind(128, 256, 128, 64, Work::in_turn)};
inline constexpr std::array<TileKind, 3> scaled_tiles{tile_kind(128, 384, 192, 128, Work::streamed),
                                                      tile_kind(128, 512, 256, 128, Work::in_passes),
                                                      tile_kind(128, 256, 128, 128, Work::streamed)};
inline constexpr std::array<TileKind, 3> scaled_gradient_tiles{tile_kind(256, 256, 256, 128, Work::in_passes),
                                                               tile_kind(256, 192, 192, 128, Work::streamed),
                                                               tile_kind(128, 512, 256, 128, Work::in_passes)};

// C_e[m, n] of every group over `depth` contracted elements. Routed rows spread evenly over the groups: they are the
// rows of C, whose m is 0, or the depth of a gradient, which is 0.
struct TiledProduct {
    int groups = 0;
    double rows = 0.0; // rows of a group
    double m = 0.0, n = 0.0, depth = 0.0;
};

// Cycles on so many clusters, every wave as long as a whole tile: a group's last rows fill half a tile on average.
inline double tiled_cycles(const TileKind& kind, TiledProduct p, int clusters) {
    if (kind.swapped) std::swap(p.m, p.n);
    const double down = p.m > 0.0 ? std::ceil(p.m / kind.down) : std::max(1.0, p.rows / kind.down + 0.5);
    const double tiles = p.groups * down * std::ceil(p.n / kind.across);
    const double steps = std::ceil((p.m > 0.0 ? p.rows : p.depth) / kind.depth);
    return std::ceil(tiles / clusters) * (steps * kind.step_cycles + kind.tile_cycles);
}

} // namespace moe
