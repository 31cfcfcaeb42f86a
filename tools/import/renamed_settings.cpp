// Settings by other names than the table of words has: those of a printed list, and those that stand for others.
#include "tools/import/renamed_settings.hpp"

#include "tools/import/lists.hpp"
#include "tools/import/phrases.hpp"
#include "tools/import/program_settings.hpp"
#include "tools/import/readers/bash_test.hpp"

#include <algorithm>

namespace moe::tools {
namespace {

// Whether a list of all arguments would have the setting so where nobody sets it.
bool is_usual(const Setting& setting, const ReaderTable& reader) {
    if (setting.values.size() == 1 && (setting.values[0].empty() || setting.values[0] == "[]")) return true;
    const auto usual = reader.defaults.find(setting.name);
    if (usual != reader.defaults.end() && same_values(setting.values, usual->second, reader)) return true;
    const auto other = reader.dumped_defaults.find(setting.name);
    return other != reader.dumped_defaults.end() && same_values(setting.values, {other->second}, reader);
}

// Settings by the engine's names in place of its program's. What is off, empty or at its default is as good as not
// set.
void name_as_options(SettingsFile& file, const ReaderTable& reader) {
    std::vector<Setting> named;
    for (Setting& setting : file.settings) {
        if (!setting.named && !setting.dumped) {
            named.push_back(std::move(setting));
            continue;
        }
        if (setting.name.find('.') != std::string::npos) { // sections, by their own names
            if (!is_usual(setting, reader)) named.push_back(std::move(setting));
            continue;
        }
        const bool off = setting.values.size() == 1 && setting.values[0] == "false";
        const auto other = reader.dumped.find(setting.name);
        std::string name = other != reader.dumped.end() ? other->second : "--" + setting.name;
        const bool opposite = name.starts_with("no ");
        if (opposite) name.erase(0, 3);
        if (off != opposite) continue;
        std::replace(name.begin(), name.end(), '_', '-');
        if (off) setting.values.clear();
        setting.name = name;
        if (is_usual(setting, reader)) continue;
        named.push_back(std::move(setting));
    }
    file.settings = std::move(named);
}

bool is_absent(const Setting& setting, const ReaderTable& reader) {
    return std::any_of(reader.absent.begin(), reader.absent.end(), [&setting](const auto& one) {
        return matches_pattern(setting.name, one.first) && setting.values == std::vector{one.second};
    });
}

// Leaves out settings that are as good as not set, and words without effect.
void leave_out(SettingsFile& file, const ReaderTable& reader) {
    std::erase_if(file.settings, [&reader](const Setting& setting) { return is_absent(setting, reader); });
    for (Setting& setting : file.settings)
        if (const auto idle = reader.idle_words.find(setting.name); idle != reader.idle_words.end()) {
            std::erase_if(setting.values, [&idle](const std::string& word) { return contains(idle->second, word); });
            if (setting.values.empty()) setting.values.emplace_back("[]");
        }
}

} // namespace

void rename_settings(SettingsFile& file, ReaderTable& reader, std::vector<Finding>& findings) {
    if (const auto program = reader.programs.find(file.program); program != reader.programs.end())
        take_program(file, program->second, reader, findings);
    name_as_options(file, reader);
    leave_out(file, reader);
    caution(file, reader.refused, reader.cautions, reader, findings);
    read_as_others(file, reader.read_as, findings);
}

} // namespace moe::tools
