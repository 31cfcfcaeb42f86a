// The FSDP pass: weights of a layer are there only while it runs, and its gradients leave as soon as they are complete.
#pragma once

#include "planner/plan/plan.hpp"
#include "planner/program/program.hpp"

namespace moe::passes {

// Into both templates of a chunk whose buckets are resharded (after recomputation): all-gathers of a layer's weights
// before the ops of the layer before (stream data, so that they run under it), in the backward again and into other
// tensors; a reduce-scatter of a layer's gradients behind the op that writes the last of them, which adds to the shard.
// Where the stack adds_to_shards, by ops of its own: what no product sets of the whole gradients is zeroed, their own
// part is reduced in place, and then added to the shard.
void reshard_pass(program::Program& program, const plan::Plan& plan, program::Template& forward,
                  program::Template& backward);
// The same of a forward that no backward follows.
void reshard_forward(program::Program& program, const plan::Plan& plan, program::Template& forward);

} // namespace moe::passes
