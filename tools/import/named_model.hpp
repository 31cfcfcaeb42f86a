// The model that a launch file names as it is published, and the vocabulary that its tokenizer's name tells.
#pragma once

#include "tools/import/model_of_facts.hpp"
#include "tools/import/reader_table.hpp"
#include "tools/import/readers/setting.hpp"

#include <string>

namespace moe::tools {

struct NamedModel {
    std::string published; // name or path in the file, empty: the file names none
    std::string model;     // profile or path of a config.json, empty: none is known
    std::string why;
};

// By the settings that the reader's table says name a model. A folder on this machine is looked into unless `alone`.
NamedModel named_model(const SettingsFile& file, const ReaderTable& reader, bool alone);

// The vocabulary by the name of the tokenizer, and in `why` what it was taken from; no fact where none tells.
Facts likely_vocabulary(const SettingsFile& file, const ReaderTable& reader, std::string& why);

} // namespace moe::tools
