// TOML by toml++: sections become names with points.
#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "tools/import/readers/readers.hpp"

#define TOML_HEADER_ONLY 1
#define TOML_EXCEPTIONS 1
// toml++ 3.3 asserts that a key begins with a letter before it refuses one that does not: the refusal is left to do it.
#define TOML_ASSERT(condition) static_cast<void>(0)
#include <toml++/toml.h>

#include <sstream>

namespace moe::tools {
namespace {

std::string text_of(const toml::node& node, int depth) {
    if (const toml::array* list = node.as_array(); list != nullptr && depth < max_depth) { // The list holds lists.
        std::string all;
        for (const toml::node& item : *list) all += (all.empty() ? "" : ",") + text_of(item, depth + 1);
        return fmt::format("[{}]", all);
    }
    if (const auto* text = node.as_string()) return text->get();
    if (const auto* flag = node.as_boolean()) return flag->get() ? "true" : "false";
    if (const auto* whole = node.as_integer()) return fmt::format("{}", whole->get());
    if (const auto* number = node.as_floating_point()) return fmt::format("{}", number->get());
    std::ostringstream stream;
    stream << toml::default_formatter(node);
    return stream.str();
}

void flatten(const toml::table& table, const std::string& section, const std::string& file, int depth,
             SettingsFile& into) {
    if (depth > max_depth) refuse("{}: sections nested more than {} deep", file, max_depth);
    for (const auto& [key, node] : table) {
        const std::string name = (section.empty() ? "" : section + ".") + std::string(key.str());
        if (const toml::table* inner = node.as_table()) {
            flatten(*inner, name, file, depth + 1, into);
            continue;
        }
        Setting setting{name, {}, file, static_cast<std::size_t>(node.source().begin.line)};
        if (const toml::array* list = node.as_array()) {
            for (const toml::node& item : *list) setting.values.push_back(text_of(item, 1));
            if (setting.values.empty()) setting.values.emplace_back("[]");
        } else {
            setting.values.push_back(text_of(node, 0));
        }
        into.set(std::move(setting));
    }
}

} // namespace

SettingsFile read_toml(const std::string& text, const std::string& file) {
    SettingsFile result;
    result.format = "torchtitan";
    try {
        flatten(toml::parse(text), "", file, 0, result);
    } catch (const toml::parse_error& error) {
        refuse("{}:{}: not valid TOML: {}", file, error.source().begin.line, shown(error.description()));
    }
    return result;
}

} // namespace moe::tools
