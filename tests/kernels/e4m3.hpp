// References of E4M3 with a scale per block: the nearest value by search, the scale by its definition, rows of both.
#pragma once

#include "kernels/fp8.hpp"
#include "tests/kernels/case.hpp"
#include "tests/kernels/tracked.hpp"

#include <cmath>
#include <limits>
#include <numeric>

namespace moe::test {

using Bytes = std::vector<std::uint8_t, Tracked<std::uint8_t>>;
inline constexpr std::uint8_t poison_byte = 0xa5;

// Searches through all values; of two that are as near it takes the one of the even byte.
inline std::uint8_t nearest(double x) {
    std::uint8_t best = 0;
    double least = std::numeric_limits<double>::infinity();
    for (int byte = 0; byte < 0x7f; ++byte) {
        const double off = std::abs(std::abs(x) - static_cast<double>(float_of_e4m3(static_cast<std::uint8_t>(byte))));
        if (off < least || (off == least && byte % 2 == 0)) least = off, best = static_cast<std::uint8_t>(byte);
    }
    return static_cast<std::uint8_t>(best | (std::signbit(x) ? 0x80 : 0));
}

// The smallest power of two that brings the largest magnitude to 448 or below.
inline double scale_of(const Vec& block) {
    double largest = 0.0;
    for (const double x : block) largest = std::max(largest, std::abs(x));
    double scale = std::ldexp(1.0, -126);
    while (largest / scale > 448.0) scale *= 2.0;
    return scale;
}

inline std::int64_t filled(const Index& counts, std::int64_t rows) {
    return counts.empty()
               ? rows
               : std::min<std::int64_t>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}), rows);
}

// The values that are quantized, x, and the place where to; y is where they come back.
struct RowData {
    FilledRows s;
    Index counts;
    Tensor x;
    Bytes q;
    Tensor scale, y;
    const std::int32_t* count() const { return counts.empty() ? nullptr : counts.data(); }
};

// Wrong bytes and scales, and rows beyond the counts that were touched.
inline std::int64_t wrong_rows(const RowData& d) {
    const std::int64_t blocks = scale_blocks(d.s.cols), used = filled(d.counts, d.s.rows);
    std::int64_t wrong = d.scale.untouched(used * blocks, (d.s.rows - used) * blocks) ? 0 : 1;
    for (std::int64_t i = used * d.s.cols; i < d.s.rows * d.s.cols; ++i)
        wrong += d.q[static_cast<std::size_t>(i)] != poison_byte;
    for (std::int64_t r = 0; r < used; ++r) {
        for (std::int64_t b = 0; b < blocks; ++b) {
            const std::int64_t first = r * d.s.cols + b * scale_block;
            const std::int64_t n = std::min<std::int64_t>(scale_block, d.s.cols - b * scale_block);
            const Vec block = d.x.values(first, n);
            const double scale = scale_of(block);
            wrong += d.scale.at(r * blocks + b) != scale;
            for (std::int64_t i = 0; i < n; ++i)
                wrong +=
                    d.q[static_cast<std::size_t>(first + i)] != nearest(block[static_cast<std::size_t>(i)] / scale);
        }
    }
    return wrong;
}

} // namespace moe::test
