// Paged stashing of routed rows: what backward needs of them is kept as rows that hold data, not as planned capacity.
#pragma once

#include "planner/program/program.hpp"

namespace moe::passes {

// Adds two copies for every activation that forward writes, backward reads and that has more planned than expected
// rows: one into pages behind its writer, and one back before the layer's backward. The tensors themselves become
// transient.
void stash_pass(program::Program& program, program::Template& forward, program::Template& backward);

} // namespace moe::passes
