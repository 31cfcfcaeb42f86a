// Where the data of a page comes from: version, date, command, hashes of its profiles, and the plan's choices.
#pragma once

#include "planner/plan/fwd.hpp"

#include <nlohmann/json_fwd.hpp>

#include <string>

namespace moe::tools {

// The fields "version", "date", "command" and "sha256". plan: the JSON of the plan; command: as typed, empty where it
// is not known.
nlohmann::ordered_json origin_json(const nlohmann::ordered_json& plan, const std::string& command);

// Fields of the plan that are not at their default: an array of {field, value}.
nlohmann::ordered_json choices_json(const plan::Plan& plan);

} // namespace moe::tools
