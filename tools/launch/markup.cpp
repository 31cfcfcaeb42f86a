// Writes YAML and TOML; tests read them back with other people's parsers.
#include "tools/launch/markup.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace moe::tools {
namespace {

using Json = nlohmann::ordered_json;

// Letters, digits, "_", "-", "." and "/" from a letter on, and no word that YAML 1.1 reads as a truth value or as null.
bool plain(const std::string& text) {
    const char* allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./";
    if (text.empty() || text.find_first_not_of(allowed) != std::string::npos) return false;
    if (std::string("0123456789-./").find(text.front()) != std::string::npos) return false;
    std::string small = text;
    std::transform(small.begin(), small.end(), small.begin(), [](unsigned char c) { return std::tolower(c); });
    for (const char* word : {"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})
        if (small == word) return false;
    return true;
}

// 1e-06 is text to YAML 1.1 and no float to TOML before 1.0: both read 1.0e-06.
std::string number(const Json& value) {
    std::string text = value.dump();
    const std::size_t e = text.find('e');
    if (e != std::string::npos && text.find('.') == std::string::npos) text.insert(e, ".0");
    return text;
}

std::string scalar(const Json& value) {
    if (value.is_string()) return plain(value.get<std::string>()) ? value.get<std::string>() : value.dump();
    return value.is_number_float() ? number(value) : value.dump();
}

bool block(const Json& value) { return value.is_object() && !value.empty(); }

std::string flow(const Json& list) {
    std::string text = "[";
    for (const Json& item : list) {
        const std::string one = item.is_array() ? flow(item) : scalar(item);
        text += fmt::format("{}{}", text.size() > 1 ? ", " : "", one);
    }
    return text + "]";
}

void yaml(const Json& map, int depth, std::string& out) {
    for (const auto& [key, value] : map.items()) {
        const std::string indent(static_cast<std::size_t>(2 * depth), ' ');
        if (block(value)) {
            out += fmt::format("{}{}:\n", indent, key);
            yaml(value, depth + 1, out);
        } else {
            out += fmt::format("{}{}: {}\n", indent, key, value.is_array() ? flow(value) : scalar(value));
        }
    }
}

std::string toml_value(const Json& value) {
    if (value.is_array()) {
        std::string text = "[";
        for (const Json& item : value) text += fmt::format("{}{}", text.size() > 1 ? ", " : "", toml_value(item));
        return text + "]";
    }
    return value.is_number_float() ? number(value) : value.dump();
}

// A table's own values stand before the tables inside of it.
void toml(const Json& table, const std::string& name, std::string& out) {
    std::string values;
    for (const auto& [key, value] : table.items())
        if (!value.is_object() && !value.is_null()) values += fmt::format("{} = {}\n", key, toml_value(value));
    if (!values.empty()) {
        if (!name.empty()) out += fmt::format("{}[{}]\n", out.empty() ? "" : "\n", name);
        out += values;
    }
    for (const auto& [key, value] : table.items())
        if (value.is_object()) toml(value, name.empty() ? key : fmt::format("{}.{}", name, key), out);
}

} // namespace

std::string to_yaml(const Json& settings) {
    std::string out;
    yaml(settings, 0, out);
    return out;
}

std::string to_toml(const Json& settings) {
    std::string out;
    toml(settings, "", out);
    return out;
}

Json nested(const Json& settings) {
    Json result = Json::object();
    for (const auto& [path, value] : settings.items()) {
        Json* at = &result;
        std::size_t start = 0;
        for (std::size_t dot = path.find('.'); dot != std::string::npos; dot = path.find('.', start)) {
            Json& inner = (*at)[path.substr(start, dot - start)];
            if (!inner.is_object()) inner = Json::object();
            at = &inner;
            start = dot + 1;
        }
        (*at)[path.substr(start)] = value;
    }
    return result;
}

} // namespace moe::tools
