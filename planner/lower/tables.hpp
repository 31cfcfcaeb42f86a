// The sum of the gradients of an embedding table that several pipeline ranks hold.
#pragma once

#include "planner/plan/fwd.hpp"
#include "planner/program/program.hpp"

#include <vector>

namespace moe::lower {

// The ops that open finish on a rank that holds a copy of the embedding table: gradients go round the holders and are
// added up in the order of holders, so that all copies stay the same bits.
// gradient: of this rank's copy; no_tensor, or a single holder: no ops. Adds tensors for what arrives.
std::vector<program::Op> add_tables(const plan::Plan& plan, program::Program& program, program::TensorId gradient);

} // namespace moe::lower
