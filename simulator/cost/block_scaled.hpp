// Products in mxfp8 and nvfp4 on tensor cores that scale blocks.
#pragma once

#include "planner/machine/precision.hpp"
#include "simulator/cost/cost.hpp"

namespace moe::cost {

// The format in which such tensor cores multiply a product of the plan (plan/block_scaling.hpp); bf16: they do not, or
// machine and stack state no rate for it. No call of one has been measured.
machine::Precision block_scaled_format(const stack::StackCosts& costs, const plan::Plan& plan, const program::Op& op,
                                       const program::Program& program);
inline bool block_scaled(const stack::StackCosts& costs, const plan::Plan& plan, const program::Op& op,
                         const program::Program& program) {
    return block_scaled_format(costs, plan, op, program) != machine::Precision::bf16;
}

// Seconds of such a product of packed operands and of the passes that pack them, nvfp4 being read twice; 0: it is none.
double block_scaled_seconds(const Rates& rates, const plan::Plan& plan, const program::Op& op,
                            const program::Program& program);

} // namespace moe::cost
