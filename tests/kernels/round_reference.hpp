// What round_operand makes of an operand, by searches through the formats' values and by definitions of scales.
#pragma once

#include "kernels/kernels.hpp"
#include "tests/kernels/case.hpp"

#include <cstdint>
#include <vector>

namespace moe::test {

// An operand of rows x cols and its results. Delayed scaling hands in `window`, a largest magnitude.
struct RoundData {
    RoundShape s;
    Index counts, positions, noise;
    Tensor x, largest, by_row, by_column;
    Tensor window = Tensor(Type::f32, Vec{0.0}); // of delayed scaling
    bool delayed = false;
    const std::int32_t* count() const { return counts.empty() ? nullptr : counts.data(); }
    RoundShape shape() const {
        RoundShape shape = s;
        if (delayed) shape.window = window.f32();
        return shape;
    }
};

// Every result, cell by cell; NaN where rows hold no data.
struct Expected {
    Vec by_row, by_column;
};
Expected expected(const RoundData& d);

// A block of 16 behind the transform, by its matrix, whose element i, j is (-1)^(number of bits that i and j share)
// / 4.
Vec transformed(const Vec& x);

} // namespace moe::test
