// The split-backward pass: a backward becomes two templates, gradients of activations first, those of weights whenever
// the schedule comes to them.
#pragma once

#include "planner/program/program.hpp"

namespace moe::passes {

struct SplitBackward {
    program::Template dgrad, wgrad;
};

// Into wgrad go the ops that only sum gradients of weights and what runs for them alone (gathers and conversions of
// their inputs, recomputation); ops that do both (norms) stay in dgrad. Order is kept. `keep_whole`: the backward stays
// in use beside its halves, which then get tensors of their own, since those that cross from one half to the other live
// longer. Runs behind all other passes on the backward but gradient reduction.
SplitBackward split_backward(program::Program& program, const program::Template& forward,
                             const program::Template& backward, bool keep_whole);

} // namespace moe::passes
