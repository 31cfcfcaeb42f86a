// Matrix products: tiles over the SMs in waves, the inner loop split where tiles are too few, memory as the floor.
#include "simulator/cost/cost.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace moe {
namespace {

struct Tile {
    double m, n;
    double rate; // of the largest tile's: a smaller tile reads each operand more often per FLOP
};
constexpr std::array<Tile, 4> tiles{{{256, 128, 1.0}, {128, 256, 1.0}, {128, 128, 0.92}, {64, 128, 0.75}}};

Precision precision_of(Dtype dtype) {
    switch (dtype) {
    case Dtype::f32:
    case Dtype::i32:
        return Precision::fp32;
    case Dtype::bf16:
        return Precision::bf16;
    case Dtype::fp8_tensor:
        return Precision::fp8_tensor;
    case Dtype::fp8_block:
        return Precision::fp8_blockwise;
    case Dtype::mxfp8:
        return Precision::mxfp8;
    case Dtype::nvfp4:
        return Precision::nvfp4;
    }
    return Precision::bf16;
}

} // namespace

// The tensor cores take both operands in one precision: the narrower one (an FP32 gradient of router logits is rounded
// to the BF16 of its weight on the way in).
Precision gemm_precision(const Op& op, const Program& program) {
    Precision precision = Precision::fp32;
    for (const TensorId id : op.in) {
        if (id == no_tensor) continue;
        const Dtype dtype = program.tensors[static_cast<std::size_t>(id)].dtype;
        if (dtype != Dtype::i32) precision = std::max(precision, precision_of(dtype));
    }
    return precision;
}

double gemm_seconds(const Rates& rates, double flop_rate, double groups, double m, double n, double k, double bytes) {
    const double sms = std::max(1.0, rates.hardware->sm_count * rates.sm_share);
    const double per_sm = flop_rate * rates.sm_share / sms;
    const double bandwidth = rates.hardware->memory_bandwidth * rates.costs->memory;
    double best = std::numeric_limits<double>::infinity();
    for (const Tile& tile : tiles) {
        const double count = groups * std::ceil(m / tile.m) * std::ceil(n / tile.n);
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

} // namespace moe
