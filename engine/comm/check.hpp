// Static proof, before a run, that the communication of all ranks lines up and cannot hang.
#pragma once

#include "planner/plan/fwd.hpp"
#include "planner/program/fwd.hpp"

#include <vector>

namespace moe::comm {

// Plays the communication ops of every rank against each other (programs by pipeline rank): collectives of a group must
// be the same op with the same sizes in the same order, every message must be received with its own size and
// micro-batch, and all ranks must reach their end. Throws Error (bad_input) that names the ranks and ops that do not.
void check_communication(const std::vector<program::Program>& programs, const plan::Mesh& mesh);

} // namespace moe::comm
