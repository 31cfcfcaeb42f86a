// Everything that moves more than it computes: bytes over bandwidth, with gathers of rows at a lower rate; or what a
// profile has measured of its parts.
#include "planner/program/op.hpp"
#include "planner/program/program.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/cost/cost.hpp"

namespace moe::cost {
namespace {

bool gathers_rows(program::OpKind kind) {
    switch (kind) {
    case program::OpKind::embedding:
    case program::OpKind::embedding_grad:
    case program::OpKind::permute_map:
    case program::OpKind::permute:
    case program::OpKind::unpermute:
    case program::OpKind::sort_rows:
    case program::OpKind::unsort_rows:
        return true;
    default:
        return false;
    }
}

} // namespace

double memory_bound_seconds(const Rates& rates, const program::Op& op) {
    const stack::StackCosts& c = *rates.costs;
    if (op.kind == program::OpKind::quantize) {
        // Fused into the kernel before it, a quantization only writes: no start of its own and a share of the traffic.
        const double bytes = op.bytes * rates.quantize_share;
        return bytes / (rates.hardware->memory_bandwidth * c.memory) +
               (rates.quantize_share < 1.0 ? 0.0 : c.kernel_seconds) + rates.own_kernels * c.expert_seconds;
    }
    const bool scans = op.kind == program::OpKind::scan || op.kind == program::OpKind::scan_grad;
    const double share = scans ? c.scan : gathers_rows(op.kind) ? c.permute : c.memory;
    return op.bytes / (rates.hardware->memory_bandwidth * share) + c.kernel_seconds * launches(c, op.kind);
}

double CostModel::columns_apart(const program::Op& op, const program::Program& program) const {
    const program::TensorId columns = op.out[1];
    const double bytes = program.tensors[static_cast<std::size_t>(columns)].expected_bytes();
    program::Op pass = op;
    pass.kind = program::OpKind::quantize;
    pass.attr = program::ColumnBlocksAttr{};
    pass.in = {columns}, pass.out = {program::no_tensor, columns};
    pass.bytes = 2.0 * bytes, pass.flops = 0.0;
    const double seconds = device_seconds(pass, program, false);
    if (op.out[0] == program::no_tensor) return seconds;
    program::Op rows = op;
    rows.out = {op.out[0]};
    rows.bytes -= bytes;
    return seconds + device_seconds(rows, program, false);
}

} // namespace moe::cost
