// The offload pass: inputs of chosen modules wait in host memory between a layer's forward and its backward.
#pragma once

#include "planner/program.hpp"

namespace moe {

// `set`: offload:: modules (optimizer states are not this pass's). A saved tensor that a chosen module reads is copied
// to the host behind its last reader of the forward, and back before the layer's backward reads it. All layers share
// one buffer on either way: a layer writes its own when the layer before it has left, and a layer's comes back when the
// module's backward of the layer before is through (staggered reload, arXiv 2603.07685 section 4.1.5). Runs behind
// recomputation, which decides what is saved. Tensors of fewer than `smallest` elements stay.
void offload_pass(Program& program, Template& forward, Template& backward, unsigned set, std::int64_t smallest);
inline constexpr std::int64_t megatron_smallest_offload = 1'000'000; // elements; Megatron-LM leaves smaller ones

} // namespace moe
