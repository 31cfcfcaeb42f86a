// Passes that pack are bound by memory; what the product itself reads of its operands is their packed bytes.
#include "simulator/cost/block_scaled.hpp"

#include "planner/machine/hardware.hpp"
#include "planner/plan/block_scaling.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/block_products.hpp"
#include "planner/stack/stack.hpp"

namespace moe::cost {

namespace {

// FLOP/s of a large product in a format; 0: nobody says.
double rate_of(const stack::StackCosts& costs, const plan::Plan& plan, machine::Precision format) {
    const auto i = static_cast<std::size_t>(format);
    return plan.hardware->peak_flops[i] * costs.gemm[i] * costs.clock;
}

} // namespace

machine::Precision block_scaled_format(const stack::StackCosts& costs, const plan::Plan& plan, const program::Op& op,
                                       const program::Program& program) {
    if (op.kind != program::OpKind::gemm || !plan::scales_blocks(plan)) return machine::Precision::bf16;
    const machine::Precision format = program::block_format(op, program);
    return rate_of(costs, plan, format) > 0.0 ? format : machine::Precision::bf16;
}

double block_scaled_seconds(const Rates& rates, const plan::Plan& plan, const program::Op& op,
                            const program::Program& program) {
    const machine::Precision format = block_scaled_format(*rates.costs, plan, op, program);
    if (format == machine::Precision::bf16) return 0.0;
    const auto& g = std::get<program::GemmAttr>(op.attr);
    const auto m = static_cast<double>(g.m), n = static_cast<double>(g.n), k = static_cast<double>(g.k);
    const bool fp4 = format == machine::Precision::nvfp4;
    const double elements = (m + n) * k, code = fp4 ? 0.5 + 1.0 / 16.0 : 1.0 + 1.0 / 32.0; // bytes with their scales
    const double bandwidth = rates.hardware->memory_bandwidth * rates.costs->memory;
    const double passes = elements * ((fp4 ? 4.0 : 2.0) + code) / bandwidth;
    const double launches = (fp4 ? 9.0 : 5.0) * rates.costs->kernel_seconds; // fills, passes and the scalars
    const double product =
        gemm_seconds(rates, rate_of(*rates.costs, plan, format), 1.0, m, n, k, op.bytes - (2.0 - code) * elements);
    return passes + launches + product;
}

} // namespace moe::cost
