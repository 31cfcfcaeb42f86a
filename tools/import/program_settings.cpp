// Programs such as ms-swift, verl and NeMo: their names, their defaults, and what they compute of their own settings.
#include "tools/import/program_settings.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "tools/import/readers/bash_test.hpp"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <optional>
#include <set>
#include <sstream>

namespace moe::tools {
namespace {

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

std::optional<std::int64_t> number_in(const SettingsFile& file, const std::string& name) {
    const Setting* setting = file.find(name);
    if (setting == nullptr || setting->values.size() != 1) return std::nullopt;
    const std::string& text = setting->values[0];
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || end != text.data() + text.size() || value < 1 || value > 1 << 30) return std::nullopt;
    return value;
}

// "A * B / C" or "A + B" of settings, from the left. What is not in the file is left out with its sign; nothing where
// one is there and no number, or where all are missing.
std::optional<std::int64_t> computed(const SettingsFile& file, const std::string& formula) {
    std::optional<std::int64_t> result;
    std::istringstream words(formula);
    std::string sign = "*";
    for (std::string word; words >> word;) {
        if (word == "*" || word == "+" || word == "/") {
            sign = word;
            continue;
        }
        if (file.find(word) == nullptr) continue;
        const auto value = number_in(file, word);
        if (!value) return std::nullopt;
        const std::int64_t left = result.value_or(sign == "+" ? 0 : 1);
        result = sign == "*" ? left * *value : sign == "+" ? left + *value : left / *value;
    }
    return result && *result > 0 ? result : std::nullopt;
}

// ['a', 'b'], as Hydra's command lines write lists of words, as its members.
void split_words(std::vector<std::string>& values) {
    if (values.size() != 1 || !values[0].starts_with('[') || !values[0].ends_with(']')) return;
    std::string text = values[0].substr(1, values[0].size() - 2);
    std::erase_if(text, [](char c) { return c == ' ' || c == '\'' || c == '"'; });
    if (text.empty() || std::isalpha(static_cast<unsigned char>(text[0])) == 0) return;
    values.clear();
    for (std::size_t at = 0; at <= text.size();) {
        const std::size_t comma = std::min(text.find(',', at), text.size());
        values.push_back(text.substr(at, comma - at));
        at = comma + 1;
    }
}

bool is_null(const std::string& value) { return value == "null" || value == "None" || value == "~"; }

// Switches that are on have no value, those that are off "false"; what has no value is not set. `opposite`: the
// engine's name says that the setting is off.
bool settle(Setting& setting, bool opposite) {
    split_words(setting.values);
    if (setting.values.size() != 1) return true;
    if (!setting.named) return !is_null(setting.values[0]); // Settings in sections are no switches.
    const std::string value = setting.values[0];
    if (is_null(value)) return false;
    const bool on = value == "true" || value == "True", off = value == "false" || value == "False";
    if (on || off) setting.values = on == opposite ? std::vector<std::string>{"false"} : std::vector<std::string>{};
    return true;
}

// The engine's name of the program's setting, "no NAME" for the opposite; empty where it is the program's own.
std::string handed_name(const Setting& setting, const Program& program) {
    const auto name = program.names.find(setting.name);
    if (name != program.names.end()) return name->second;
    for (const std::string& section : program.sections)
        if (setting.name.starts_with(section + ".")) return setting.name.substr(section.size() + 1);
    return setting.named ? setting.name : std::string();
}

} // namespace

void caution(const SettingsFile& file, const std::vector<Caution>& refused, const std::vector<Caution>& cautions,
             ReaderTable& reader, std::vector<Finding>& findings) {
    for (const Caution& one : refused)
        if (const Setting* setting = find_caution(file, one)) refuse("{}", warned(*setting, one.says));
    for (const Caution& one : cautions)
        if (const Setting* setting = find_caution(file, one)) {
            findings.push_back({Severity::warning, setting->name, warned(*setting, one.says)});
            reader.harmless.push_back(one.setting); // It is told once.
        }
}

void read_as_others(SettingsFile& file, const std::vector<StandIn>& list, std::vector<Finding>& findings) {
    for (const StandIn& one : list) {
        const Setting* found = file.find(one.setting);
        if (found == nullptr || !matches_pattern(found->text(), one.value)) continue;
        if (!one.with.empty() && !file.has(one.with)) continue;
        const Setting setting = *found;
        std::erase_if(file.settings, [&one](const Setting& each) { return each.name == one.setting; });
        for (const auto& [name, value] : one.as) {
            Setting other{name, {}, setting.file, setting.line, false, !name.starts_with('-')};
            if (value != "on") other.values.push_back(value == "off" ? "false" : value);
            file.set(std::move(other));
        }
        if (!one.says.empty()) findings.push_back({Severity::warning, setting.name, warned(setting, one.says)});
    }
}

void take_program(SettingsFile& file, const Program& program, ReaderTable& reader, std::vector<Finding>& findings) {
    caution(file, program.refused, program.cautions, reader, findings);
    read_as_others(file, program.read_as, findings);
    for (const auto& [name, value] : program.own)
        if (file.find(name) == nullptr) file.set({name, {value}, "", 0});
    if (const auto nodes = number_in(file, program.nodes)) file.nodes = static_cast<int>(*nodes);
    if (const auto processes = number_in(file, program.processes)) file.processes = static_cast<int>(*processes);
    SettingsFile handed;
    const auto in_sections = [](const std::string& name) { return name.find('.') != std::string::npos; };
    for (const auto& [name, value] : program.defaults) {
        Setting usual{name, {}, "", 0, true, !in_sections(name)};
        if (value != "true" || in_sections(name)) usual.values.push_back(value);
        handed.set(std::move(usual));
    }
    std::set<std::string> said; // names that the file sets, if only to nothing
    for (Setting setting : file.settings) {
        std::string name = handed_name(setting, program);
        if (name.empty()) { // the program's own, or an option of the engine itself
            handed.set(std::move(setting));
            continue;
        }
        const bool opposite = name.starts_with("no ");
        if (opposite) name.erase(0, 3);
        setting.name = name;
        setting.named = !in_sections(name);
        said.insert(name);
        if (settle(setting, opposite))
            handed.set(std::move(setting));
        else
            std::erase_if(handed.settings, [&name](const Setting& other) { return other.name == name; });
    }
    const auto is_set = [&](const std::string& name) {
        std::string option = "--" + name; // as the engine's own programs have it
        std::replace(option.begin(), option.end(), '_', '-');
        return handed.find(option) != nullptr || (said.contains(name) && handed.find(name) != nullptr);
    };
    for (const auto& [name, formula] : program.computed)
        if (const auto value = computed(file, formula); value && !is_set(name))
            handed.set({name, {fmt::format("{}", *value)}, file.settings.front().file, 0, false, !in_sections(name)});
    file.settings = std::move(handed.settings);
    reader.harmless.insert(reader.harmless.end(), program.harmless.begin(), program.harmless.end());
}

} // namespace moe::tools
