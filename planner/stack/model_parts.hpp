// Parts of a model that few architectures have, as one set: what an engine may lack beside the usual layer.
#pragma once

#include "planner/plan/fwd.hpp"

#include <string>

namespace moe::stack {

// A bit for each part that some layer of the plan's model, or the model itself, has.
unsigned model_parts(const plan::Plan& plan);

// "none", or the names of the parts in the table's order, joined by +. profiles/engines/README.md says what they are.
std::string model_parts_text(unsigned parts);

// The bits of "none", of one name or of several joined by +. Throws Error (bad_input) naming an unknown part.
unsigned model_parts_from_string(const std::string& text);

} // namespace moe::stack
