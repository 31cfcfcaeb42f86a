// Settings by other names than the table of words has: those of a printed list, and those that stand for others.
#include "tools/import/renamed_settings.hpp"

#include "planner/base/error.hpp"
#include "tools/import/phrases.hpp"

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
void name_dumped(SettingsFile& file, const ReaderTable& reader) {
    std::vector<Setting> named;
    for (Setting& setting : file.settings) {
        if (!setting.dumped) {
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

void rename_settings(SettingsFile& file, const ReaderTable& reader, std::vector<Finding>& findings) {
    name_dumped(file, reader);
    read_as_others(file, reader, findings);
}

} // namespace moe::tools
