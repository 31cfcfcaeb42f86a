// Settings by name: the last one of a name counts, as in every engine.
#include "tools/import/readers/setting.hpp"

#include "planner/base/error.hpp"

#include <algorithm>

namespace moe::tools {

bool has_unknown(const std::string& text) { return text.find(unknown_mark) != std::string::npos; }

std::string as_written(const std::string& text) {
    std::string plain;
    for (const char c : text)
        if (c != unknown_mark) plain += c;
    return plain;
}

bool Setting::unknown() const { return std::any_of(values.begin(), values.end(), has_unknown); }

std::string Setting::place() const { return line == 0 ? file : fmt::format("{}:{}", file, line); }

std::string Setting::text() const { return as_written(fmt::format("{}", fmt::join(values, " "))); }

const Setting* SettingsFile::find(const std::string& name) const {
    for (auto setting = settings.rbegin(); setting != settings.rend(); ++setting)
        if (setting->name == name) return &*setting;
    return nullptr;
}

void SettingsFile::set(Setting setting) {
    const auto same = [&setting](const Setting& other) { return other.name == setting.name; };
    const auto found = std::find_if(settings.begin(), settings.end(), same);
    if (found != settings.end()) {
        *found = std::move(setting);
        return;
    }
    if (settings.size() >= max_settings) refuse("{}: more than {} settings", setting.file, max_settings);
    settings.push_back(std::move(setting));
}

bool SettingsFile::has(const std::string& words) const {
    if (const std::size_t bar = words.find('|'); bar != std::string::npos)
        return has(words.substr(0, bar)) || has(words.substr(bar + 1));
    if (words.starts_with('!')) return !has(words.substr(1));
    const std::size_t equals = words.find('=');
    const Setting* setting = find(words.substr(0, equals));
    if (setting == nullptr) return false;
    const std::vector<std::string>& values = setting->values;
    if (equals != std::string::npos)
        return std::find(values.begin(), values.end(), words.substr(equals + 1)) != values.end();
    return values.size() != 1 || (values[0] != "false" && values[0] != "False" && values[0] != "null");
}

} // namespace moe::tools
