// Reads formats of logs from profiles/logs, and numbers out of lines.
#include "tools/measured/log_format.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json_object.hpp"
#include "planner/base/names.hpp"
#include "planner/base/profile.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>

namespace moe::tools {

namespace {

constexpr std::array<const char*, log_fields> field_names = {
    "iteration", "seconds",       "tokens_per_second", "tokens_per_second_per_gpu", "tflops", "loss", "batch",
    "tokens",    "allocated_gib", "reserved_gib"};

bool word(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_'; }
bool digit(char c) { return c >= '0' && c <= '9'; }

// The digits of a number with its commas left out: 1,234,567 and 1,234.5, three digits behind every comma.
std::size_t plain_number(std::string_view text, std::string& out) {
    std::size_t at = 0;
    const auto digits = [&] {
        const std::size_t first = at;
        for (; at < text.size() && digit(text[at]); ++at) out += text[at];
        return at - first;
    };
    if (at < text.size() && (text[at] == '-' || text[at] == '+')) {
        if (text[at] == '-') out += '-';
        ++at;
    }
    std::size_t whole = digits();
    const bool grouped = whole >= 1 && whole <= 3;
    while (grouped && at + 3 < text.size() && text[at] == ',' && digit(text[at + 1]) && digit(text[at + 2]) &&
           digit(text[at + 3]) && !(at + 4 < text.size() && digit(text[at + 4]))) {
        ++at;
        whole += digits();
    }
    std::size_t behind = 0;
    if (at < text.size() && text[at] == '.') {
        out += '.';
        ++at;
        behind = digits();
    }
    if (whole + behind == 0) return 0;
    std::size_t exponent = at + 1;
    if (at < text.size() && (text[at] == 'e' || text[at] == 'E')) {
        if (exponent < text.size() && (text[exponent] == '-' || text[exponent] == '+')) ++exponent;
        if (exponent < text.size() && digit(text[exponent])) {
            out += 'e';
            if (text[exponent - 1] == '-') out += '-';
            at = exponent;
            digits();
        }
    }
    return at;
}

std::optional<FoundNumber> number_at(std::string_view line, std::size_t from) {
    while (from < line.size() && line[from] == ' ') ++from;
    std::string digits;
    const std::size_t length = plain_number(line.substr(from, 64), digits);
    if (length == 0) return std::nullopt;
    FoundNumber found;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), found.value);
    if (error != std::errc() || !std::isfinite(found.value)) return std::nullopt;
    found.end = from + length;
    return found;
}

std::vector<std::string> texts(const JsonObject& json, const std::string& key) {
    if (!json.has(key)) return {};
    std::vector<std::string> all = json.is_string(key) ? std::vector<std::string>{json.string(key)} : json.strings(key);
    for (const std::string& text : all)
        if (text.empty()) json.refuse_value(key, "an empty text stands in every line");
    return all;
}

LogNumber read_number(const JsonObject& fields, const std::string& name) {
    LogNumber number;
    const auto at = std::find(field_names.begin(), field_names.end(), name);
    if (at == field_names.end())
        refuse("{}: unknown field '{}'{}; one of {}", fields.place(), shown(name),
               did_you_mean(name, {field_names.begin(), field_names.end()}), fmt::join(field_names, ", "));
    number.field = static_cast<LogField>(at - field_names.begin());
    const JsonObject json = fields.object(name);
    json.only({"after", "scale"});
    number.after = texts(json, "after");
    if (number.after.empty()) json.refuse_value("after", "the text before the number is missing");
    number.scale = json.number_or("scale", 1.0, 1e-12, 1e12);
    return number;
}

std::vector<LogLine> read_lines(const JsonObject& json, const std::string& key) {
    std::vector<LogLine> lines;
    if (!json.has(key)) return lines;
    const JsonObject all = json.object(key);
    for (const std::string& name : all.keys()) {
        const JsonObject entry = all.object(name);
        entry.only({"has", "lacks", "numbers"});
        LogLine line;
        line.has = texts(entry, "has");
        line.lacks = texts(entry, "lacks");
        if (line.has.empty()) refuse("{}: has is empty: every line would fit", entry.place());
        const JsonObject numbers = entry.object("numbers");
        for (const std::string& name : numbers.keys()) line.numbers.push_back(read_number(numbers, name));
        lines.push_back(std::move(line));
    }
    return lines;
}

bool contains(std::string_view line, const std::string& text) { return line.find(text) != std::string_view::npos; }

} // namespace

std::optional<FoundNumber> number_after(std::string_view line, std::string_view text, std::size_t from) {
    if (text.empty()) return std::nullopt;
    for (std::size_t at = line.find(text, from); at != std::string_view::npos; at = line.find(text, at + 1)) {
        if (at > 0 && word(text.front()) && word(line[at - 1])) continue;
        if (const auto found = number_at(line, at + text.size())) return found;
    }
    return std::nullopt;
}

bool LogLine::matches(std::string_view line) const {
    for (const std::string& text : has)
        if (!contains(line, text)) return false;
    for (const std::string& text : lacks)
        if (contains(line, text)) return false;
    return true;
}

LogValues LogLine::read(std::string_view line, bool peak) const {
    LogValues values;
    for (const LogNumber& number : numbers) {
        std::optional<double>& value = value_of(values, number.field);
        for (const std::string& text : number.after) {
            auto found = number_after(line, text);
            for (; found; found = peak ? number_after(line, text, found->end) : std::nullopt)
                value = std::max(value.value_or(found->value * number.scale), found->value * number.scale);
            if (value) break;
        }
    }
    return values;
}

LogFormat parse_log_format(const std::string& text, const std::string& place) {
    const JsonObject json = JsonObject::parse(text, place);
    json.only({"name", "engine", "twin", "source", "start", "iterations", "memory", "facts"});
    LogFormat format;
    format.name = json.string("name");
    format.engine = json.string("engine");
    format.twin = json.string_or("twin", "");
    format.start = texts(json, "start");
    format.iterations = read_lines(json, "iterations");
    format.memory = read_lines(json, "memory");
    format.facts = read_lines(json, "facts");
    if (format.iterations.empty()) refuse("{}: iterations is empty: no line would tell of a step", place);
    return format;
}

std::vector<LogFormat> load_log_formats() {
    std::vector<LogFormat> formats;
    for (const std::string& name : profile_names("logs")) {
        const std::string path = find_profile(name, "logs", "log format", "").path;
        formats.push_back(parse_log_format(read_file(path), path));
    }
    return formats;
}

} // namespace moe::tools
