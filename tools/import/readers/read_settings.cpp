// Chooses the reader of each file by its name and its beginning, and lays the files over each other.
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/names.hpp"
#include "tools/import/readers/readers.hpp"

#include <algorithm>
#include <filesystem>

namespace moe::tools {
namespace {

SettingsFile read_one(const std::string& file, BashValues& values) {
    std::error_code ignored;
    const auto bytes = std::filesystem::file_size(file, ignored);
    // Logs may be of any length: what they print of their arguments stands at their beginning.
    const std::string text = read_file(file, max_file_bytes + 1);
    if (has_argument_dump(text)) return read_argument_dump(text, file);
    if (!ignored && bytes > max_file_bytes)
        refuse("{}: {} bytes, and a launch file has at most {}", file, bytes, max_file_bytes);
    if (text.size() > max_file_bytes) refuse("{}: more than {} bytes", file, max_file_bytes);
    if (text.find('\0') != std::string::npos) refuse("{}: not a text file", file);
    const std::string extension = std::filesystem::path(file).extension().string();
    if (extension == ".py")
        refuse("{}: Python is not read, since only a run tells what it sets: give the command or the log of a run, or "
               "the run_config.yaml beside its checkpoints",
               file);
    if (extension == ".toml") return read_toml(text, file);
    if (extension == ".yaml" || extension == ".yml" || extension == ".json") return read_yaml(text, file, values);
    return read_launch_script(text, file, values);
}

void lay_over(SettingsFile& all, SettingsFile next) {
    if (!all.format.empty() && !next.format.empty() && all.format != next.format)
        refuse("import: the files are of {} and of {}: give those of one engine, or say which with --from", all.format,
               next.format);
    if (all.format.empty()) all.format = next.format;
    for (Setting& setting : next.settings) all.set(std::move(setting));
    for (const auto& [name, value] : next.environment) all.environment[name] = value;
    for (Unread& unread : next.unread) all.unread.push_back(std::move(unread));
    if (!next.program.empty()) all.program = next.program;
    if (!next.recipe.empty()) all.recipe = next.recipe;
    if (next.nodes > 0) all.nodes = next.nodes;
    if (next.processes > 0) all.processes = next.processes;
    if (next.tasks > 0) all.tasks = next.tasks;
}

// The first few names of settings, as far as their first point.
std::string some_names(const SettingsFile& all) {
    std::vector<std::string> names;
    for (const Setting& setting : all.settings) {
        const std::string name = shown(setting.name.substr(0, setting.name.find('.')));
        if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
        if (names.size() == 4) break;
    }
    return fmt::format("{}", fmt::join(names, ", "));
}

} // namespace

SettingsFile read_settings(const std::vector<std::string>& files, const std::string& from, bool alone) {
    SettingsFile all;
    BashValues values(files.empty() ? "" : files.front(), !alone);
    for (const std::string& file : files) {
        SettingsFile one = read_one(file, values);
        if (!from.empty()) one.format = from;
        lay_over(all, std::move(one));
    }
    // Files of a model's sizes start nothing: their arrays are the settings, under those of other files.
    if (all.format.empty() || all.format == "megatron-lm") {
        SettingsFile sizes = settings_of_variables(values, files.empty() ? "" : files.front());
        const bool missing = sizes.find("--num-layers") != nullptr && all.find("--num-layers") == nullptr;
        if (all.settings.empty() || missing) {
            lay_over(sizes, std::move(all));
            all = std::move(sizes);
        }
    }
    if (all.settings.empty())
        refuse("{}: starts no training: no command with flags and no section of settings was found",
               fmt::join(files, ", "));
    if (all.format.empty())
        refuse("{}: of which engine settings named {} are cannot be told: say it with --from, or give the command that "
               "reads the file",
               files.empty() ? "" : files.front(), some_names(all));
    return all;
}

} // namespace moe::tools
