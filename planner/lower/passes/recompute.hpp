// The recompute pass: forward ops of chosen modules run again in the backward template, so their outputs need not be
// kept.
#pragma once

#include "planner/program/program.hpp"

namespace moe::passes {

// True where a set of recompute:: modules holds the module of a forward op.
bool recomputes(unsigned set, const program::Op& op);

// `set`: recompute:: modules. For every tensor that a backward op reads and a chosen forward op of the same layer
// wrote, the forward op is repeated (phase recompute) right before its first reader, and so on for its own inputs, as
// far as the set reaches; everything else stays saved. A layer's input is never recomputed: it belongs to the layer
// before. keeps_core: the attention core is repeated for its own backward, but what follows it keeps its output, as
// Megatron does: its checkpoint around the core (megatron/core/transformer/attention.py,
// _checkpointed_attention_forward) discards what lies inside, and the output projection saves its input.
void recompute_pass(program::Program& program, const program::Template& forward, program::Template& backward,
                    unsigned set, bool keeps_core = false);

} // namespace moe::passes
