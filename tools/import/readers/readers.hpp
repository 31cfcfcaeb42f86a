// Readers of launch files: each turns a file into settings with their places. What the settings mean is decided
// elsewhere.
#pragma once

#include "tools/import/readers/bash_values.hpp"
#include "tools/import/readers/setting.hpp"

#include <string>
#include <vector>

namespace YAML {
class Node;
}

namespace moe::tools {

// All throw Error (bad_input) "FILE:LINE: why" for what is not of the format or beyond a bound of size or nesting.

// A bash script that starts a training, or the arguments alone. `values`: variables that files before it export; after
// the call also those of this one. Arguments of the last command that starts a training program count.
SettingsFile read_launch_script(const std::string& text, const std::string& file, BashValues& values);
// Words of a command line: flags with two hyphens and their values, or words NAME=VALUE with points in the name.
void add_arguments(SettingsFile& into, const std::vector<std::string>& words, const std::string& file,
                   std::size_t line);

// The flags in variables of scripts that start nothing: MODEL_ARGS=(--num-layers 2 ..), in files of a model's sizes.
SettingsFile settings_of_variables(const BashValues& values, const std::string& file);

// YAML: the recipes of Megatron-LM (ARGS or MODEL_ARGS beside ENV_VARS), else sections whose names are joined by
// points.
SettingsFile read_yaml(const std::string& text, const std::string& file, BashValues& values);
// Adds the values of a YAML document below `name` ("" at the top): sections become names with points, lists several
// values.
void add_yaml(SettingsFile& into, const YAML::Node& node, const std::string& name, const std::string& file);

// Whether YAML is a configuration of Primus, whose modules name a framework.
bool is_primus(const YAML::Node& root);
// Such a configuration: its module's overrides over the files that it names, which are looked up in the folder
// primus/configs above it where `values` follow files.
SettingsFile read_primus(const YAML::Node& root, const std::string& file, const BashValues& values);

// Puts the values in the place of ${a.b}, ${.c} and ${mul:2,${.d}}; what cannot be known is marked.
void fill_references(SettingsFile& file);
// Where names of settings are those of a program such as verl, slime or NeMo: that program, the format of the engine
// that it hands them to, and the values of their references.
void take_program_of(SettingsFile& file);

// TOML: sections whose names are joined by points.
SettingsFile read_toml(const std::string& text, const std::string& file);

// Whether a log holds the list of all arguments that Megatron-LM prints as it starts, or some lines of it.
bool has_argument_dump(const std::string& text);
// That list, the last one where a job began again: settings in the names of the program's variables ("num_layers"),
// without those that are None. A switch that is on has no value, one that is off "false".
SettingsFile read_argument_dump(const std::string& text, const std::string& file);

// All of the files as one, later ones over earlier ones. `from`: the engine, empty: as the files tell. Throws Error
// (bad_input) also where it cannot be told, or files are of several engines. alone: no other file is read, whatever
// scripts name.
SettingsFile read_settings(const std::vector<std::string>& files, const std::string& from, bool alone);

} // namespace moe::tools
