// Gives a JSON document its text, with the name of its schema in front.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <string>

namespace moe::tools {

// schema: a name of planner/base/schema.hpp. Every document that a verb prints or keeps passes through here.
std::string stamped(const char* schema, const nlohmann::ordered_json& document);

} // namespace moe::tools
