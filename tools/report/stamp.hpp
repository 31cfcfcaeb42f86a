// Gives a JSON document its text, with the name of its schema in front; and a figure that there may not be its value.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <optional>
#include <string>

namespace moe::tools {

// A figure, or null where there is none.
nlohmann::ordered_json or_null(const std::optional<double>& value);

// schema: a name of planner/base/schema.hpp. Every document that a verb prints or keeps passes through here.
std::string stamped(const char* schema, const nlohmann::ordered_json& document);

} // namespace moe::tools
