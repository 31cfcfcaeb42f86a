// What a rank's accelerator holds beside the plan's arena and its communicators.
#pragma once

#include "planner/plan.hpp"

namespace moe {

// Bytes: the hardware's context_bytes and, where this project's engine trains a plan in BF16 on a GPU, the scratch of
// the attention library, which keeps a backward's score gradients so that every run has the same bits
// (kernels/README.md).
double library_memory(const Plan& plan);

// Bytes of that scratch for one backward of `batch` sequences: slices of sequences or key heads, each a matrix of BF16
// score gradients per head, gradients of each head's keys and values where heads share them, a sum per query; 0 where
// one key head's group is so large that the library is not asked.
double attention_scratch(std::int64_t batch, int heads, int kv_heads, int qk_dim, int v_dim, std::int64_t seq);

} // namespace moe
