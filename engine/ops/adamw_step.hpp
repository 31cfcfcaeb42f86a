// AdamW of one rank's shard as data: what a device queues, and what the host's cores run later.
#pragma once

#include "engine/ops/op_context.hpp"

#include <cstdint>
#include <span>

namespace moe::ops {

struct AdamwStep {
    std::int64_t elements = 0, decayed = 0, offset = 0; // AdamAttr's; elements of the bucket before the shard
    std::span<const ShardPart> parts;                   // the executor's; none: the shard moves as one
    const float *gradients = nullptr, *norm = nullptr, *hyper = nullptr, *overflow = nullptr;
    float* master = nullptr;
    Dst exp_avg, exp_avg_sq, weights; // exp_avg: bytes where in_fp8, MXFP8 with its scales behind the elements
    bool in_fp8 = false;
};
AdamwStep adamw_step_of(const OpContext& context);

// Elements [first, last) of the shard; of whole blocks of 32 where moments are in FP8.
void run_adamw(const Kernels& kernels, const AdamwStep& step, std::int64_t first, std::int64_t last, void* stream);
// All of it by the CPU's kernels on so many threads, and the weights made from the masters even in a step that changes
// none, as they go to the device either way. Operands lie in host memory.
void run_on_host(const AdamwStep& step, int threads);

} // namespace moe::ops
