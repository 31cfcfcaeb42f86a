// Pieces of which the verbs of the command line are made; for the files of this folder that define verbs.
#pragma once

#include "tools/verbs/verbs.hpp"

#include <CLI/CLI.hpp>

#include <functional>
#include <string>
#include <type_traits>

namespace moe::tools {

// Throws Error (bad_input) for digits that the library would read as another number than a person: 010 and 0x10, which
// it takes for 8 and 16, and what is beyond 64 bits, which it cuts. Returns "" for all else, as a check of CLI11 does.
std::string check_whole(const std::string& name, const std::string& text);

// An option or a positional argument whose value is of the kind `type`: help shows it, and completion offers what it
// stands for (description.hpp).
template <class T>
CLI::Option* add(CLI::App* verb, const std::string& name, T& value, const std::string& type, const std::string& about) {
    CLI::Option* option = verb->add_option(name, value, about)->type_name(type);
    if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>)
        option->check([name](const std::string& text) { return check_whole(name, text); });
    return option;
}

// An option that names a file to write. Where it is a folder, or lies in none, the command line is refused before any
// work: throws Error (bad_input) naming option and folder.
CLI::Option* add_written(CLI::App* verb, const std::string& name, std::string& value, const std::string& about);

// One verb: its name, its line in the overview and an example, the options that every verb has, and what runs when it
// is chosen.
CLI::App* add_verb(CLI::App& app, OutputOptions& o, const std::string& name, const std::string& about,
                   const std::string& example, std::function<void()> run);

// Verbs that train, or read and write what training needs (training_commands.cpp).
void add_execute(CLI::App& app, ExecuteOptions& o);
void add_evaluate(CLI::App& app, EvaluateOptions& o);
void add_generate(CLI::App& app, GenerateOptions& o);
void add_calibrate(CLI::App& app, CalibrateOptions& o);
void add_tokenize(CLI::App& app, TokenizeOptions& o);
void add_export(CLI::App& app, ExportVerbOptions& o);

} // namespace moe::tools
