// Static proof, before a run on devices, that streams side by side cannot wait for each other in a cycle.
#pragma once

#include "engine/device/streams.hpp"

#include <vector>

namespace moe::comm {

// Plays one pipeline's streams (programs and memory by pipeline rank) against each other as queued communication runs
// them: a message when it is next on its stream at both ends, a collective over pipeline ranks when it is next at all
// of them. Ranks of one pipeline rank run the same Program at the same time, so what is only between them always goes
// on. Throws Error (bad_input) that names the ranks and ops that wait, or the messages that are not received in order.
void check_streams(const std::vector<program::Program>& programs, const std::vector<memory::MemoryPlan>& memory,
                   const plan::Mesh& mesh);

// A device that gives an arena's tensors addresses only, for those who just compare them.
std::unique_ptr<device::Device> open_nowhere();

} // namespace moe::comm
