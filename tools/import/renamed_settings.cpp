// Settings by other names than the table of words has: those of a printed list, and those that stand for others.
#include "tools/import/renamed_settings.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "tools/import/phrases.hpp"
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

// The settings of a program between the file and the engine become those that it hands over.
void take_program(SettingsFile& file, const Program& program) {
    SettingsFile handed;
    for (const auto& [name, value] : program.defaults) {
        Setting usual{name, {}, "", 0, true, true};
        if (value != "true") usual.values.push_back(value);
        handed.set(std::move(usual));
    }
    for (Setting& setting : file.settings) {
        const auto absent = program.absent.find(setting.name);
        if (absent != program.absent.end() && setting.values == std::vector{absent->second}) setting.values = {"false"};
        const auto name = program.names.find(setting.name);
        if (setting.named && name != program.names.end()) setting.name = name->second;
        handed.set(std::move(setting));
    }
    file.settings = std::move(handed.settings);
}

void caution(const SettingsFile& file, const ReaderTable& reader, std::vector<Finding>& findings) {
    for (const Caution& one : reader.cautions)
        for (const Setting& setting : file.settings) {
            const std::string value = setting.text();
            if (!matches_pattern(setting.name, one.setting) || !matches_pattern(value, one.value)) continue;
            findings.push_back({Severity::warning, setting.name,
                                fmt::format("{}: {} {}: {}", setting.place(), setting.name, shown(value), one.says)});
            break;
        }
}

// Settings that no plan can say are read as those that take the same time and memory.
void read_as_others(SettingsFile& file, const ReaderTable& reader, std::vector<Finding>& findings) {
    for (Setting& setting : file.settings) {
        const auto other = reader.read_as.find(setting.name);
        if (other == reader.read_as.end() || file.find(other->second) != nullptr) continue;
        findings.push_back({Severity::warning, setting.name,
                            fmt::format("{}: {} is read as {}, which takes the same time and memory", setting.place(),
                                        setting.name, other->second)});
        setting.name = other->second;
    }
}

} // namespace

void rename_settings(SettingsFile& file, ReaderTable& reader, std::vector<Finding>& findings) {
    if (const auto program = reader.programs.find(file.program); program != reader.programs.end()) {
        take_program(file, program->second);
        const std::vector<std::string>& harmless = program->second.harmless;
        reader.harmless.insert(reader.harmless.end(), harmless.begin(), harmless.end());
    }
    name_as_options(file, reader);
    caution(file, reader, findings);
    read_as_others(file, reader, findings);
}

} // namespace moe::tools
