// Matrix products: tiles over the SMs in waves, the inner loop split where tiles are too few, memory as the floor.
#include "planner/program/program.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/cost/cost.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace moe::cost {
namespace {

struct Tile {
    double m, n;
    double rate; // of the largest tile's: a smaller tile reads each operand more often per FLOP
};
constexpr std::array<Tile, 4> tiles{{{256, 128, 1.0}, {128, 256, 1.0}, {128, 128, 0.92}, {64, 128, 0.75}}};

machine::Precision precision_of(program::Dtype dtype) {
    switch (dtype) {
    case program::Dtype::f32:
    case program::Dtype::i32:
        return machine::Precision::fp32;
    case program::Dtype::bf16:
        return machine::Precision::bf16;
    case program::Dtype::fp8_tensor:
        return machine::Precision::fp8_tensor;
    case program::Dtype::fp8_block:
    case program::Dtype::fp8_columns:
        return machine::Precision::fp8_blockwise;
    case program::Dtype::mxfp8:
        return machine::Precision::mxfp8;
    case program::Dtype::nvfp4:
        return machine::Precision::nvfp4;
    }
    return machine::Precision::bf16;
}

} // namespace

// The tensor cores take both operands in one precision: the narrower one (an FP32 gradient of router logits is rounded
// to the BF16 of its weight on the way in).
machine::Precision gemm_precision(const program::Op& op, const program::Program& program) {
    machine::Precision precision = machine::Precision::fp32;
    for (const program::TensorId id : op.in) {
        if (id == program::no_tensor) continue;
        const program::Dtype dtype = program.tensors[static_cast<std::size_t>(id)].dtype;
        if (dtype != program::Dtype::i32) precision = std::max(precision, precision_of(dtype));
    }
    return precision;
}

namespace {

// Tiles of `tile` rows that groups of `rows` rows on average fill. Groups differ by `spread` (standard deviation over
// mean): a group that fills its last tile by any part pays for all of it, as Gamma-distributed rows do by their
// quantiles (Wilson and Hilferty's cube-root approximation, 1931).
double tiles_of(double rows, double tile, double spread) {
    if (!(spread > 0.0)) return std::ceil(rows / tile);
    constexpr std::array<double, 8> normal{-1.534, -0.887, -0.489, -0.157, 0.157, 0.489, 0.887, 1.534}; // mid-octiles
    const double v = spread * spread / 9.0;
    std::array<double, normal.size()> share{};
    double sum = 0.0, tiles = 0.0;
    for (std::size_t i = 0; i < normal.size(); ++i) {
        share[i] = std::pow(std::max(0.0, 1.0 - v + normal[i] * std::sqrt(v)), 3.0);
        sum += share[i];
    }
    for (const double s : share) tiles += std::ceil(rows * s / sum * normal.size() / tile);
    return tiles / normal.size();
}

} // namespace

double gemm_seconds(const Rates& rates, double flop_rate, double groups, double m, double n, double k, double bytes,
                    double spread) {
    const double sms = std::max(1.0, rates.hardware->sm_count * rates.sm_share);
    const double per_sm = flop_rate * rates.sm_share / sms;
    const double bandwidth = rates.hardware->memory_bandwidth * rates.costs->memory;
    double best = std::numeric_limits<double>::infinity();
    for (const Tile& tile : tiles) {
        const double count = groups * tiles_of(m, tile.m, spread) * std::ceil(n / tile.n);
        for (double split = 1.0; split == 1.0 || (split <= 16.0 && k / split >= 256.0); split *= 2.0) {
            const double waves = std::ceil(count * split / sms);
            const double per_tile =
                2.0 * tile.m * tile.n * (k / split) / (per_sm * tile.rate) + rates.costs->tile_seconds;
            const double partial_sums = split > 1.0 ? 8.0 * groups * m * n * split / bandwidth : 0.0;
            best = std::min(best, std::max(waves * per_tile, bytes / bandwidth) + partial_sums);
        }
    }
    return best + rates.costs->kernel_seconds;
}

} // namespace moe::cost
