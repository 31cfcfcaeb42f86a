// Products whose rows do not begin at whole 16 bytes, which the fast kernels of every library leave to slower ones.
#pragma once

#include "planner/program/fwd.hpp"
#include "planner/stack/fwd.hpp"

#include <cstdint>

namespace moe::cost {

// The first width, in elements, of a product's operands and result whose rows are not whole 16 bytes, 0 where all are.
// Sides of fewer than 8 elements do not count: such products are bound by memory, however their rows begin.
std::int64_t unaligned_width(const program::Op& op, const program::Program& program);

// Times as long that a product takes for it, at least 1; 1 for other ops. Measured with
// `kernels_cuda_test --alignment` on an H200 (profiles/measured/h200-2026-11-26-alignment.json): cuBLASLt takes 2.8 to
// 3.9 times as long where rows begin at multiples of 4 or 8 bytes, 4.5 to 8.3 times where at multiples of 2.
double alignment_slowdown(const stack::StackCosts& costs, const program::Op& op, const program::Program& program);

} // namespace moe::cost
