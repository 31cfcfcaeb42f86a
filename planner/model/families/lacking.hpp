// Families that are known by name and not read, with the part of them that this program lacks.
#pragma once

#include <string>

namespace moe::families {

// What a family's layers have that no layer here does, by an architecture ("JambaForCausalLM") or a model_type
// ("jamba"); empty for names that are not known.
std::string lacking_part(const std::string& written);

} // namespace moe::families
