// Reads formats of logs from profiles/logs, and numbers out of lines.
#include "tools/measured/log_format.hpp"

#include "planner/base/digit.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json_object.hpp"
#include "planner/base/names.hpp"
#include "planner/base/profile.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

namespace moe::tools {

namespace {

constexpr std::array<const char*, log_fields> field_names = {"iteration",
                                                             "seconds",
                                                             "average_seconds",
                                                             "average_steps_per_second",
                                                             "elapsed",
                                                             "samples_per_second",
                                                             "tokens_per_second",
                                                             "tokens_per_second_per_gpu",
                                                             "tflops",
                                                             "mfu",
                                                             "loss",
                                                             "skipped",
                                                             "allocated_gib",
                                                             "reserved_gib",
                                                             "reserved_percent",
                                                             "capacity_gib",
                                                             "batch",
                                                             "tokens",
                                                             "seq",
                                                             "micro_batch",
                                                             "gpus",
                                                             "tensor_parallel",
                                                             "context_parallel",
                                                             "pipeline_parallel",
                                                             "expert_parallel",
                                                             "layers",
                                                             "hidden"};

bool word(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_'; }

// The digits of a number with its commas left out: 1,234,567 and 1,234.5, three digits behind every comma.
std::size_t plain_number(std::string_view text, std::string& out) {
    std::size_t at = 0;
    const auto digits = [&] {
        const std::size_t first = at;
        for (; at < text.size() && is_digit(text[at]); ++at) out += text[at];
        return at - first;
    };
    if (at < text.size() && (text[at] == '-' || text[at] == '+')) {
        if (text[at] == '-') out += '-';
        ++at;
    }
    std::size_t whole = digits();
    const bool grouped = whole >= 1 && whole <= 3;
    while (grouped && at + 3 < text.size() && text[at] == ',' && is_digit(text[at + 1]) && is_digit(text[at + 2]) &&
           is_digit(text[at + 3]) && !(at + 4 < text.size() && is_digit(text[at + 4]))) {
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
        if (exponent < text.size() && is_digit(text[exponent])) {
            out += 'e';
            if (text[exponent - 1] == '-') out += '-';
            at = exponent;
            digits();
        }
    }
    return at;
}

// Behind blanks, quotes, and two or more dots with which tables of arguments are filled.
std::size_t skip_filling(std::string_view line, std::size_t from) {
    const auto skip = [&](std::string_view any) {
        const std::size_t end = std::min(line.find_first_not_of(any, from), line.size());
        return end - std::exchange(from, end);
    };
    skip(" '\"");
    const std::size_t before = from;
    if (skip(".") < 2) return before;
    skip(" '\"");
    return from;
}

std::optional<FoundNumber> number_at(std::string_view line, std::size_t from) {
    from = skip_filling(line, from);
    std::string digits;
    const std::size_t length = plain_number(line.substr(from, 64), digits);
    if (length == 0) return std::nullopt;
    FoundNumber found;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), found.value);
    if (error != std::errc() || !std::isfinite(found.value)) return std::nullopt;
    found.end = from + length;
    return found;
}

// "1:02:03", "02:03", "1d 2h 3m 4s" in seconds.
std::optional<FoundNumber> duration_at(std::string_view line, std::size_t from) {
    constexpr std::string_view units = "dhms";
    constexpr std::array<double, 4> seconds = {86400.0, 3600.0, 60.0, 1.0};
    FoundNumber found{0.0, from};
    std::size_t part = 0; // of a clock's time, or the next smaller unit
    bool clock = false, some = false;
    while (part < seconds.size()) {
        const auto number = number_at(line, found.end);
        if (!number || number->value < 0.0) break;
        const char next = number->end < line.size() ? line[number->end] : ' ';
        if (next == ':' || clock) {
            if (some && !clock) break;
            found = {60.0 * found.value + number->value, number->end + (next == ':' ? 1 : 0)};
            some = clock = true;
            if (next != ':') break;
            ++part;
            continue;
        }
        const std::size_t unit = units.find(next, part);
        if (unit == std::string_view::npos) break;
        found = {found.value + number->value * seconds[unit], number->end + 1};
        some = true;
        part = unit + 1;
    }
    return some ? std::optional(found) : std::nullopt;
}

// The first place behind the text, as a word of its own, where `at` finds something.
template <typename At>
std::optional<FoundNumber> first_after(std::string_view line, std::string_view text, std::size_t from, const At& at) {
    if (text.empty()) return std::nullopt;
    for (std::size_t place = line.find(text, from); place != std::string_view::npos;
         place = line.find(text, place + 1)) {
        if (place > 0 && word(text.front()) && word(line[place - 1])) continue;
        if (const auto found = at(place + text.size())) return found;
    }
    return std::nullopt;
}

double letter_factor(std::string_view behind) {
    if (behind.empty() || (behind.size() > 1 && word(behind[1]))) return 1.0;
    switch (behind.front()) {
    case 'K':
        return 1e3;
    case 'M':
        return 1e6;
    case 'G':
    case 'B':
        return 1e9;
    case 'T':
        return 1e12;
    default:
        return 1.0;
    }
}

bool begins_with_one(std::string_view text, const std::vector<std::string>& beginnings) {
    return std::any_of(beginnings.begin(), beginnings.end(),
                       [&](const std::string& one) { return text.starts_with(one); });
}

std::vector<std::string> texts(const JsonObject& json, const std::string& key) {
    if (!json.has(key)) return {};
    std::vector<std::string> all = json.is_string(key) ? std::vector<std::string>{json.string(key)} : json.strings(key);
    for (const std::string& text : all)
        if (text.empty()) json.refuse_value(key, "an empty text stands in every line");
    return all;
}

void read_number(const JsonObject& fields, const std::string& name, std::vector<LogNumber>& numbers) {
    const auto at = std::find(field_names.begin(), field_names.end(), name);
    if (at == field_names.end())
        refuse("{}: unknown field '{}'{}; one of {}", fields.place(), shown(name),
               did_you_mean(name, {field_names.begin(), field_names.end()}), fmt::join(field_names, ", "));
    const std::vector<JsonObject> ways =
        fields.is_array(name) ? fields.objects(name) : std::vector{fields.object(name)};
    for (const JsonObject& json : ways) {
        json.only({"after", "before", "not_before", "scale", "letters"});
        LogNumber number;
        number.field = static_cast<LogField>(at - field_names.begin());
        number.after = texts(json, "after");
        if (number.after.empty()) json.refuse_value("after", "the text before the number is missing");
        number.before = texts(json, "before");
        number.not_before = texts(json, "not_before");
        number.scale = json.number_or("scale", 1.0, 1e-12, 1e12);
        number.letters = json.boolean_or("letters", false);
        numbers.push_back(std::move(number));
    }
}

std::vector<LogLine> read_lines(const JsonObject& json, const std::string& key) {
    std::vector<LogLine> lines;
    if (!json.has(key)) return lines;
    const JsonObject all = json.object(key);
    for (const std::string& name : all.keys()) {
        const JsonObject entry = all.object(name);
        entry.only({"has", "has_one", "lacks", "numbers", "from", "until"});
        LogLine line;
        line.has = texts(entry, "has");
        line.has_one = texts(entry, "has_one");
        line.lacks = texts(entry, "lacks");
        if (line.has.empty()) refuse("{}: has is empty: every line would fit", entry.place());
        line.from = texts(entry, "from");
        line.until = texts(entry, "until");
        if (line.from.empty() != line.until.empty())
            refuse("{}: from and until belong together: give both or neither", entry.place());
        const JsonObject numbers = entry.object("numbers");
        for (const std::string& name : numbers.keys()) read_number(numbers, name, line.numbers);
        lines.push_back(std::move(line));
    }
    return lines;
}

bool contains(std::string_view line, const std::string& text) { return line.find(text) != std::string_view::npos; }

} // namespace

std::optional<FoundNumber> number_after(std::string_view line, std::string_view text, std::size_t from) {
    return first_after(line, text, from, [&](std::size_t place) { return number_at(line, place); });
}

std::optional<FoundNumber> number_of(const LogNumber& number, std::string_view line, std::string_view text,
                                     std::size_t from) {
    return first_after(line, text, from, [&](std::size_t place) -> std::optional<FoundNumber> {
        auto found = number.field == LogField::elapsed ? duration_at(line, place) : number_at(line, place);
        if (!found) return std::nullopt;
        const std::string_view behind = line.substr(found->end);
        const std::string_view next = behind.substr(std::min(behind.find_first_not_of(' '), behind.size()));
        if (!number.before.empty() && !begins_with_one(next, number.before)) return std::nullopt;
        if (begins_with_one(next, number.not_before)) return std::nullopt;
        found->value *= number.scale * (number.letters ? letter_factor(behind) : 1.0);
        return found;
    });
}

bool LogLine::matches(std::string_view line) const {
    const auto stands = [&](const std::string& text) { return contains(line, text); };
    return std::all_of(has.begin(), has.end(), stands) &&
           (has_one.empty() || std::any_of(has_one.begin(), has_one.end(), stands)) &&
           std::none_of(lacks.begin(), lacks.end(), stands);
}

bool LogLine::opens(std::string_view line) const {
    const auto stands = [&](const std::string& text) {
        const auto number = std::find_if(numbers.begin(), numbers.end(), [&](const LogNumber& one) {
            return one.field == LogField::iteration && std::count(one.after.begin(), one.after.end(), text) > 0;
        });
        return number == numbers.end() ? contains(line, text) : number_of(*number, line, text).has_value();
    };
    return !from.empty() && std::all_of(from.begin(), from.end(), stands);
}

LogValues LogLine::read(std::string_view line, bool peak) const {
    LogValues values;
    for (const LogNumber& number : numbers) {
        std::optional<double>& value = value_of(values, number.field);
        for (const std::string& text : number.after) {
            if (value) break;
            auto found = number_of(number, line, text);
            for (; found; found = peak ? number_of(number, line, text, found->end) : std::nullopt)
                value = std::max(value.value_or(found->value), found->value);
        }
    }
    return values;
}

LogFormat parse_log_format(const std::string& text, const std::string& place) {
    const JsonObject json = JsonObject::parse(text, place);
    json.only({"name", "engine", "twin", "refused", "source", "start", "iterations", "memory", "facts"});
    LogFormat format;
    format.name = json.string("name");
    format.engine = json.string("engine");
    format.twin = json.string_or("twin", "");
    format.refused = json.string_or("refused", "");
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
