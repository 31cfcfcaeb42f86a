// Values of a chat template: their text, truth, order and parts, and the filters, tests and methods on them.
#pragma once

#include "engine/data/text/chat_template.hpp"

#include <optional>
#include <string>
#include <vector>

namespace moe::data::chat {

using Json = ChatTemplate::Json;

inline Json undefined() { return Json(Json::value_t::discarded); }
inline bool is_undefined(const Json& value) { return value.is_discarded(); }

// All throw Error (bad_input) that names `place` and the operation where it does not take such a value.
bool truth(const Json& value);
std::string text_of(const Json& value, const std::string& place); // as {{ }} writes it
std::string python_json(const Json& value);                       // as json.dumps(value, ensure_ascii=False)
// value.name or value[name]; undefined where a mapping has no such key, or a list no such place.
Json part(const Json& value, const Json& key, const std::string& place);
// value[first:last:step] of a list, or of a string's characters; null stands for what is left out.
Json slice(const Json& value, const Json& first, const Json& last, const Json& step, const std::string& place);
bool contains(const Json& value, const Json& item, const std::string& place);
// An operator of two values: + - * / // % ~ == != < > <= >=.
Json binary(const std::string& op, const Json& a, const Json& b, const std::string& place);
Json filter(const std::string& name, const Json& value, const std::vector<Json>& arguments, const std::string& place);
bool test(const std::string& name, const Json& value, const std::string& place);
Json method(const std::string& name, const Json& value, const std::vector<Json>& arguments, const std::string& place);
// The items that a loop goes over: of a list, the keys of a mapping.
std::vector<Json> items(const Json& value, const std::string& place);

} // namespace moe::data::chat
