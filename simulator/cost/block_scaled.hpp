// Products in mxfp8 and nvfp4 on tensor cores that scale blocks.
#pragma once

#include "simulator/cost/cost.hpp"

namespace moe::cost {

// Whether such tensor cores multiply a product of the plan (plan/block_scaling.hpp), and machine and stack state a rate
// for it. No call of one has been measured.
bool block_scaled(const stack::StackCosts& costs, const plan::Plan& plan, const program::Op& op,
                  const program::Program& program);

// Seconds of such a product of packed operands and of the passes that pack them, nvfp4 being read twice; 0: it is none.
double block_scaled_seconds(const Rates& rates, const plan::Plan& plan, const program::Op& op,
                            const program::Program& program);

} // namespace moe::cost
