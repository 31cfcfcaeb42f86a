// Products head by head: where their operands lie.
#pragma once

#include "planner/program/op.hpp"

#include <cstdint>

namespace moe::layers {

// Where an operand of head by head products lies: elements between rows and between heads, and before the first.
struct Heads {
    std::int64_t row = 0, step = 0, first = 0;
};

// One product for every head: c[m, n] of its part of a and its part of b.
inline program::GemmAttr by_heads(std::int64_t heads, std::int64_t m, std::int64_t n, std::int64_t k, const Heads& a,
                                  const Heads& b, const Heads& c) {
    program::GemmAttr attr;
    attr.batch = static_cast<int>(heads);
    attr.m = m, attr.n = n, attr.k = k;
    attr.lda = a.row, attr.a_step = a.step, attr.a_offset = a.first;
    attr.ldb = b.row, attr.b_step = b.step, attr.b_offset = b.first;
    attr.ldc = c.row, attr.c_step = c.step, attr.c_offset = c.first;
    return attr;
}

// The columns of x, `each` of every head.
inline Heads columns_of(std::int64_t heads, std::int64_t each) { return {heads * each, each, 0}; }

} // namespace moe::layers
