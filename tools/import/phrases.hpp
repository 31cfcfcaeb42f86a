// The settings that an entry of an engine's table writes, seen from the side of who reads them.
#pragma once

#include "tools/engines/engine_table.hpp"
#include "tools/import/reader_table.hpp"
#include "tools/import/readers/setting.hpp"

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace moe::tools {

// One setting of an entry: words as the table has them, placeholders among them.
struct Phrase {
    std::string name; // "--num-layers", "model.num_layers"; "$NAME" of an environment variable
    std::vector<std::string> words;
    bool flag() const { return name.rfind("--", 0) == 0; }
    bool environment() const { return !name.empty() && name[0] == '$'; }
};
// Of the part that the reader's format is ("args", "bridge", "config"), and of the environment. With `model`, those of
// Megatron-Bridge's model sections too, by which a recipe's configuration says a model.
std::vector<Phrase> phrases_of(const EngineEntry& entry, const std::string& part, bool model);

// What the phrase says of a plan. Throws Error (bad_input) for what cannot be said of it.
std::vector<std::string> said(const EngineEntry& entry, const plan::Plan& plan, const Phrase& phrase);

// What placeholders stand for where a setting has these values: {"$value": "4"}. `literal`: the words that are none are
// those of the setting.
struct Capture {
    std::map<std::string, std::vector<std::string>> values;
    bool literal = true;
};
Capture captured(const Phrase& phrase, const std::vector<std::string>& values, const ReaderTable& table);

// Whether two settings mean the same: numbers by value, lists of names in any order, words of the table's groups.
bool same_values(const std::vector<std::string>& a, const std::vector<std::string>& b, const ReaderTable& table);
// "([0]*3+[1]*2)" as "[0,0,0,1,1]", where it is such a list; else nothing.
std::optional<std::string> list_of(const std::string& text);
// A list of `layers` marks for a number in place of one (Frequency::marks).
std::string marks_of(int every, int layers, const std::string& marks);

} // namespace moe::tools
