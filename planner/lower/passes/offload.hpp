// The offload pass: inputs of chosen modules wait in host memory between a layer's forward and its backward.
#pragma once

#include "planner/program/program.hpp"

namespace moe::passes {

// `set`: offload:: modules (optimizer states are not this pass's). A saved tensor that a chosen module reads is copied
// to the host behind its last reader of the forward, and back before the layer's backward reads it. All layers share
// one buffer on either way: a layer writes its own when the layer before it has left, and a layer's comes back when the
// module's backward of the layer before is through (staggered reload, arXiv 2603.07685 section 4.1.5). Runs behind
// recomputation, which decides what is saved.
struct OffloadRules {
    std::int64_t smallest = 1; // elements; smaller tensors stay
    // Copies of routed rows move all planned ones, since no host knows how many there are.
    bool planned_rows = false;
};
inline constexpr OffloadRules our_offload{1, true}, megatron_offload{1'000'000, false};
void offload_pass(program::Program& program, program::Template& forward, program::Template& backward, unsigned set,
                  const OffloadRules& rules);

} // namespace moe::passes
