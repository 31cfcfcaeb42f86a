// The data-parallel pass: the ops of step_ops.hpp over their tensors, with gradient reductions placed where their
// bucket is complete, so that they run under the backward.
#pragma once

#include "planner/lower/passes/first_gradients.hpp"
#include "planner/program/program.hpp"

namespace moe::passes {

// `backward` with a reduce-scatter (in place, stream data) of every bucket of its chunk right after the op that writes
// the bucket's gradients last. Buckets whose group is one rank, and those that FSDP reduces itself, are left alone. A
// backward in two slots gets them in the second: buckets that only the first writes are reduced before its ops. HSDP's
// shards are then summed over their copies. Where a BF16 copy is reduced, casts stand around it.
program::Template with_gradient_reduction(program::Program& program, const plan::Plan& plan,
                                          const program::Template& backward);

// The gathers of updated weights and the zeroing of gradients, but for those that products set (`first`), which open a
// step, and what closes it: norm and optimizer.
program::Template begin_template(program::Program& program, const plan::Plan& plan, const FirstGradients& first);
program::Template finish_template(const program::Program& program, const plan::Plan& plan);
// The same where there is no backward: gathers alone, and the sums over ranks of losses and loads.
program::Template gather_template(const program::Program& program, const plan::Plan& plan);
program::Template sum_template(const program::Program& program, const plan::Plan& plan);

} // namespace moe::passes
