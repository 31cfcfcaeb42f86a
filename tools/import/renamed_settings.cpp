// Settings by other names than the table of words has: those of a printed list, and those that stand for others.
#include "tools/import/renamed_settings.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "tools/import/lists.hpp"
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
        const auto name = program.names.find(setting.name);
        if (setting.named && name != program.names.end()) setting.name = name->second;
        handed.set(std::move(setting));
    }
    file.settings = std::move(handed.settings);
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
            std::erase_if(setting.values,
                          [&idle](const std::string& word) { return contains(idle->second, word); });
            if (setting.values.empty()) setting.values.emplace_back("[]");
        }
}

const Setting* find_caution(const SettingsFile& file, const Caution& one) {
    if (!one.with.empty() && !file.has(one.with)) return nullptr;
    const auto found = std::find_if(file.settings.begin(), file.settings.end(), [&one](const Setting& setting) {
        return matches_pattern(setting.name, one.setting) && matches_pattern(setting.text(), one.value);
    });
    return found == file.settings.end() ? nullptr : &*found;
}

std::string warned(const Setting& setting, const std::string& says) {
    if (setting.values.empty()) return fmt::format("{}: {}: {}", setting.place(), setting.name, says);
    return fmt::format("{}: {} {}: {}", setting.place(), setting.name, shown(setting.text()), says);
}

void caution(const SettingsFile& file, ReaderTable& reader, std::vector<Finding>& findings) {
    for (const Caution& one : reader.refused)
        if (const Setting* setting = find_caution(file, one)) refuse("{}", warned(*setting, one.says));
    for (const Caution& one : reader.cautions)
        if (const Setting* setting = find_caution(file, one)) {
            findings.push_back({Severity::warning, setting->name, warned(*setting, one.says)});
            reader.harmless.push_back(one.setting); // It is told once.
        }
}

// Settings that no plan can say are read as others.
void read_as_others(SettingsFile& file, const ReaderTable& reader, std::vector<Finding>& findings) {
    for (const StandIn& one : reader.read_as) {
        const Setting* found = file.find(one.setting);
        if (found == nullptr || !matches_pattern(found->text(), one.value)) continue;
        const Setting setting = *found;
        if (!one.with.empty() && !file.has(one.with)) continue;
        std::erase_if(file.settings, [&one](const Setting& each) { return each.name == one.setting; });
        for (const auto& [name, value] : one.as) {
            Setting other{name, {}, setting.file, setting.line};
            if (value != "on") other.values.push_back(value == "off" ? "false" : value);
            file.set(std::move(other));
        }
        if (!one.says.empty())
            findings.push_back({Severity::warning, setting.name, warned(setting, one.says)});
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
    leave_out(file, reader);
    caution(file, reader, findings);
    read_as_others(file, reader, findings);
}

} // namespace moe::tools
