// Values of an engine's settings: what a placeholder of a table stands for in one plan.
#pragma once

#include "planner/plan/fwd.hpp"
#include "tools/engines/engine_table.hpp"

#include <nlohmann/json.hpp>

#include <string>

namespace moe::tools {

// Those that profiles/engines/README.md names, and "$WORD" of every plan field and fact.
bool known_placeholder(const std::string& text);

// A word as the number or list that it is, else as text: "4" and "[0,1]" are no texts.
nlohmann::ordered_json literal(const std::string& word);

// Such a value as a word: a text without its quotation marks, all else as JSON.
std::string text_of_json(const nlohmann::ordered_json& value);

// The value of one setting: text that begins with $ is replaced, inside of lists too; all else stands for itself.
nlohmann::ordered_json engine_value(const EngineEntry& entry, const plan::Plan& plan,
                                    const nlohmann::ordered_json& value);
// The same as words of a command line: one word, several for a set of modules, a list of numbers in one word, such as
// "([0]*3+[1]*58)".
std::vector<std::string> engine_words(const EngineEntry& entry, const plan::Plan& plan, const std::string& value);

} // namespace moe::tools
