// Reads a model: a Hugging Face config.json by path, or the name of a profile.
#pragma once

#include "planner/model/model.hpp"

#include <string>
#include <vector>

namespace moe::families {

// Reads a config from JSON text. `place` names the file in errors. Throws Error (bad_input) for text that is not JSON,
// an unknown architecture, missing or contradictory fields.
model::Model model_from_json(const std::string& text, const std::string& place);
// `name_or_path`: a path to a config.json (or a folder holding one), or a name in profiles/models.
model::Model load_model(const std::string& name_or_path);

// Fields of the model's config that nothing was read from and that may change what it computes.
std::vector<std::string> unread_fields(const model::Model& model);

// The "model_type" of a config, or else the one by which transformers knows its class; empty: it has none. Throws as
// model_from_json does.
std::string model_type_of(const std::string& config, const std::string& place);

// Names that "architectures" may have, sorted.
std::vector<std::string> architecture_names();

} // namespace moe::families
