// The list of all arguments that Megatron-LM prints as it starts, in a log: settings by the names that its program has.
#include "planner/base/error.hpp"
#include "tools/import/readers/readers.hpp"

#include <algorithm>
#include <cctype>
#include <charconv>

namespace moe::tools {
namespace {

constexpr const char *begins = "--- arguments ---", *ends = "--- end of arguments ---";
constexpr int least_pasted = 8; // lines that are a list without its first line

std::string trimmed(const std::string& text) {
    const std::size_t first = text.find_first_not_of(" \t\r"), last = text.find_last_not_of(" \t\r");
    return first == std::string::npos ? "" : text.substr(first, last - first + 1);
}

bool is_number(const std::string& text) {
    return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

// A member of a printed list: 'moe_act', 3, or <CudaGraphModule.attn: 2>.
std::string member(std::string text) {
    text = trimmed(text);
    if (text.size() > 1 && (text.front() == '\'' || text.front() == '"') && text.back() == text.front())
        return text.substr(1, text.size() - 2);
    const std::size_t point = text.find('.'), colon = text.find(':');
    if (text.starts_with('<') && point != std::string::npos && colon != std::string::npos && point < colon)
        return text.substr(point + 1, colon - point - 1);
    return text;
}

// [0, 1, 1] as scripts write it: [0]*1+[1]*2.
std::string as_sum(const std::vector<std::string>& marks) {
    std::string sum;
    for (std::size_t at = 0; at < marks.size();) {
        std::size_t end = at;
        while (end < marks.size() && marks[end] == marks[at]) ++end;
        sum += fmt::format("{}[{}]*{}", sum.empty() ? "" : "+", marks[at], end - at);
        at = end;
    }
    return sum;
}

std::vector<std::string> values_of(const std::string& printed) {
    if (printed == "True") return {};
    if (printed == "False") return {"false"};
    if (printed == "[]") return {""};
    const bool tuple = printed.starts_with('(') && printed.ends_with(')');
    if (!tuple && !(printed.starts_with('[') && printed.ends_with(']'))) return {member(printed)};
    std::vector<std::string> members;
    const std::string inside = printed.substr(1, printed.size() - 2);
    for (std::size_t at = 0; at < inside.size();) {
        const std::size_t comma = std::min(inside.find(',', at), inside.size());
        members.push_back(member(inside.substr(at, comma - at)));
        at = comma + 1;
    }
    if (tuple) return {fmt::format("{}", fmt::join(members, ","))};
    if (members.size() > 1 && std::all_of(members.begin(), members.end(), is_number)) return {as_sum(members)};
    return members;
}

// "NAME ..... VALUE" behind whatever a launcher writes before each line; no name: another line.
Setting printed_argument(const std::string& line) {
    Setting setting;
    const std::size_t dots = line.find(" ."), behind = line.find_first_not_of('.', dots + 1);
    if (dots == std::string::npos || behind == std::string::npos || line[behind] != ' ') return setting;
    if (behind - dots < 3 && line.find("  ") == std::string::npos) return setting; // prose
    std::size_t first = dots;
    const auto part = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; };
    while (first > 0 && part(line[first - 1])) --first;
    const std::string value = trimmed(line.substr(behind));
    if (first == dots || value == "None") return setting;
    setting.name = line.substr(first, dots - first);
    setting.values = values_of(value);
    setting.dumped = setting.named = true;
    return setting;
}

int count_of(const Setting& setting) {
    int count = 0;
    if (setting.values.size() == 1)
        std::from_chars(setting.values[0].data(), setting.values[0].data() + setting.values[0].size(), count);
    return std::max(count, 0);
}

// "> padded vocab (size: 151936) with ..", which is printed once the tokenizer is known: its size, or nothing.
std::string vocabulary_in(const std::string& line) {
    const std::string before = "padded vocab (size: ";
    const std::size_t at = line.find(before);
    if (at == std::string::npos) return "";
    const std::string size = line.substr(at + before.size(), line.find(')', at) - at - before.size());
    return is_number(size) ? size : "";
}

// Calls visit(line, number from 1) for each line.
template <class Visit>
void each_line(const std::string& text, const Visit& visit) {
    std::size_t number = 0;
    for (std::size_t at = 0; at < text.size();) {
        const std::size_t end = std::min(text.find('\n', at), text.size());
        visit(text.substr(at, end - at), ++number);
        at = end + 1;
    }
}

} // namespace

bool has_argument_dump(const std::string& text) {
    if (text.find(begins) != std::string::npos) return true;
    int printed = 0; // pasted without what stands around them
    each_line(text,
              [&](const std::string& line, std::size_t) { printed += printed_argument(line).name.empty() ? 0 : 1; });
    return printed >= least_pasted;
}

SettingsFile read_argument_dump(const std::string& text, const std::string& file) {
    SettingsFile result;
    Setting vocabulary{"vocab_size", {}, file, 0, true, true};
    bool inside = text.find(begins) == std::string::npos;
    each_line(text, [&](const std::string& line, std::size_t number) {
        if (line.find(begins) != std::string::npos) { // A job that began again prints them again.
            result = {};
            vocabulary.values.clear();
            inside = true;
        } else if (line.find(ends) != std::string::npos) {
            inside = false;
        } else if (const std::string size = vocabulary_in(line); !size.empty()) {
            vocabulary.values = {size}, vocabulary.line = number;
        } else if (Setting setting = inside ? printed_argument(line) : Setting{}; !setting.name.empty()) {
            setting.file = file;
            setting.line = number;
            if (setting.name == "world_size") result.tasks = count_of(setting);
            result.set(std::move(setting));
        }
    });
    if (!vocabulary.values.empty() && result.find("vocab_size") == nullptr) result.set(std::move(vocabulary));
    result.format = "megatron-lm";
    return result;
}

} // namespace moe::tools
