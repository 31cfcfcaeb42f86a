// The arguments of an op function: the op with its resolved operands, and the rank that runs it.
#pragma once

#include "engine/comm/communicator.hpp"
#include "engine/ops/shard_part.hpp"
#include "kernels/kernels.hpp"
#include "planner/program/program.hpp"

#include <cstddef>
#include <cstdint>
#include <span>

namespace moe::ops {

// The facts that an op needs to know of the rank that runs it.
struct RankPosition {
    int rank = 0;
    int tensor = 0;        // index in the TP group
    int context = 0;       // index in the CP group
    int ring = 0;          // index among the CP ranks whose keys and values go round
    int heads = 0;         // index among the CP ranks that trade heads for tokens
    int expert = 0;        // index in the EP group
    int expert_domain = 0; // index of its NVLink domain among those of the EP group, where dispatch has two levels
    int expert_tensor = 0; // index in the ETP group
    int key_part = 0;      // index among the TP ranks that hold all key heads between them
};

struct OpContext {
    const program::Op& op;
    const program::Program& program;
    const RankPosition& position;
    comm::Communicator& communicator;
    const Kernels& kernels;
    void* stream = nullptr;        // stream for the kernels
    void* const* in = nullptr;     // inputs by index in op.in; null where the operand is absent
    void* const* out = nullptr;    // outputs by index in op.out
    std::int64_t shard_offset = 0; // elements of the bucket before this rank's shard, for adamw
    int reserved_sms = 0;          // multiprocessors that a product leaves to what runs beside it
    bool merged = false;           // whether another slot's ops run beside it
    // Parts of this rank's shard that the optimizer treats differently, for ops of the optimizer; none: all alike.
    std::span<const ShardPart> parts = {};
    float* largest_logits = nullptr; // of the op's heads, for attention (AttentionShape::largest); null: nobody asks

    // Of a product of whole blocks (program::block_format()): Backend::block_scaled_gemm and their format; else null.
    bool (*block_scaled_gemm)(RoundFormat, const GemmShape&, Src, Src, Dst, void*) = nullptr;
    RoundFormat block_format = RoundFormat::mxfp8;

    // Shape and dtype of an operand; only for operands that are present.
    const program::Tensor& input(std::size_t i) const { return program.tensors[static_cast<std::size_t>(op.in[i])]; }
    const program::Tensor& output(std::size_t i) const { return program.tensors[static_cast<std::size_t>(op.out[i])]; }
    bool has_input(std::size_t i) const { return i < op.in.size() && op.in[i] != program::no_tensor; }
    bool has_output(std::size_t i) const { return i < op.out.size() && op.out[i] != program::no_tensor; }
};

} // namespace moe::ops
