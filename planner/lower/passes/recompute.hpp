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
//
// With operators, products count in the order in which they run, packed ones as the projections that PyTorch has (of
// queries, keys and values; of gate and up): every second one is repeated, of a packed one that share. What the rest of
// it wrote is one more output of the forward, which the repeated product takes as a further operand. Grouped products
// are no such operators: they are repeated.
void recompute_pass(program::Program& program, program::Template& forward, program::Template& backward, unsigned set,
                    bool keeps_core = false);

} // namespace moe::passes
