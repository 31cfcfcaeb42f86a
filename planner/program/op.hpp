// An op: what one rank computes or communicates, with its tensors, attributes, bytes and FLOPs.
#pragma once

#include "planner/plan/group.hpp"
#include "planner/program/op_attr.hpp"
#include "planner/program/op_kind.hpp"
#include "planner/program/operands.hpp"

#include <cstdint>

namespace moe::program {

struct Op {
    OpKind kind{};
    Stream stream = Stream::compute;
    Module module = Module::residual;
    Phase phase = Phase::forward;
    std::int16_t layer = -1; // global decoder layer, -1 = none
    plan::Group group{};     // communication ops
    Operands in, out;        // optional operands that are absent are no_tensor
    Attr attr;
    double flops = 0.0; // executed, not model, FLOPs at expected rows
    // Device memory read and written at expected rows. Communication: bytes of one rank's larger side (all_gather:
    // output, reduce_scatter: input, all_reduce: the tensor, all_to_all_rows and *_tokens: the T*K rows, own share
    // included).
    double bytes = 0.0;
};

} // namespace moe::program
