// Settings as YAML and as TOML, in the order that they have.
#pragma once

#include <nlohmann/json.hpp>

#include <string>

namespace moe::tools {

// Written here and not by yaml-cpp or toml++: one sorts keys, the other would be the only library that the program
// loads, and what is written is maps, lists and scalars. Texts are quoted where YAML 1.1 could take them for something
// else.
std::string to_yaml(const nlohmann::ordered_json& settings);

// Tables of tables; null is left out, since TOML has none.
std::string to_toml(const nlohmann::ordered_json& settings);

// {"a.b": 1} as {"a": {"b": 1}}; a name that is a setting and a section as well takes the later.
nlohmann::ordered_json nested(const nlohmann::ordered_json& settings);

} // namespace moe::tools
