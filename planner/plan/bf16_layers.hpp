// First and last decoder layers that a plan of a lower precision keeps in BF16.
#pragma once

#include "planner/plan/fwd.hpp"

#include <string>

namespace moe::plan {

// The plan's model with these layers marked (LayerKind::bf16), all others plain; MTP layers are never marked.
// Megatron's
// --first-last-layers-bf16 with the numbers of layers at start and end. Throws Error (bad_input) for numbers below 0 or
// more layers than there are.
void keep_in_bf16(Plan& plan, int first, int last);

// "none" or "FIRST+LAST", as --fix bf16_layers takes it. Throws Error (bad_input).
std::string bf16_layers_to_string(const Plan& plan);
void bf16_layers_from_string(Plan& plan, const std::string& text);

} // namespace moe::plan
