// Expansion of words. A part that cannot be known is kept between marks, so that who reads the word can say which.
#include "tools/import/readers/bash_values.hpp"

#include "planner/base/error.hpp"

#include <cctype>
#include <filesystem>
#include <set>
#include <sstream>
#include <utility>

namespace moe::tools {
namespace {

constexpr std::size_t max_expanded = std::size_t{32} << 20;

bool in_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

std::string marked(const std::string& raw) { return fmt::format("{0}{1}{0}", unknown_mark, raw); }

// Past the quote or bracket that closes what begins at `at`, which stands behind the opening character.
std::size_t past(const std::string& raw, std::size_t at, char open, char close) {
    int depth = 1;
    while (at < raw.size()) {
        const char c = raw[at++];
        if (c == '\\' && at < raw.size())
            ++at;
        else if (c == '\'' && close != '"')
            at = std::min(raw.find('\'', at), raw.size() - 1) + 1;
        else if (c == close && --depth == 0)
            return at;
        else if (c == open && open != close)
            ++depth;
    }
    return raw.size();
}

// The folder of the script itself, as $(dirname "$0") and `cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd` ask for it;
// nothing for any other command.
std::optional<std::string> own_folder(const std::string& command, const std::string& file) {
    static const std::set<std::string> beside{"cd", "--", "readlink", "realpath",  "-f", "-e",
                                              "-P", "-L", "pwd",      "/dev/null", "2",  "1"};
    std::string text;
    for (const char c : command) text += std::string("\"'`();&>").find(c) != std::string::npos ? ' ' : c;
    std::istringstream words(text);
    std::filesystem::path folder = file;
    int up = 0;
    bool self = false;
    for (std::string word; words >> word;) {
        const bool dollar = word == "$"; // of an inner $( )
        const bool names = word == "$0" || word == "${0}" || word == "${BASH_SOURCE[0]}" || word == "$BASH_SOURCE" ||
                           word == "${BASH_SOURCE}";
        const bool below = self && word.size() > 1 && word[0] == '/' && word != "/dev/null";
        self = self || names;
        if (word == "dirname")
            ++up;
        else if (below)
            folder /= word.substr(1);
        else if (!names && !dollar && beside.count(word) == 0)
            return std::nullopt;
        for (; names && up > 0; --up) folder = folder.has_parent_path() ? folder.parent_path() : ".";
    }
    if (!self || folder == file) return std::nullopt;
    std::string normal = folder.lexically_normal().string();
    if (normal.size() > 1 && normal.ends_with('/')) normal.pop_back();
    return normal;
}

} // namespace

// Words in the making: blanks outside of quotes end one.
struct BashValues::Fields {
    std::vector<std::string> done;
    std::string current;
    bool begun = false, split = true;
    bool nothing = false; // whether an array without members stood inside of the quotes: "${A[@]}" is no word then

    void add(const std::string& text, bool quoted) {
        if (quoted || !split) {
            current += text;
            begun = begun || quoted || !text.empty();
            return;
        }
        bool inside = false; // whether marks hold a part as it is written, whose blanks split nothing
        for (const char c : text) {
            if (c == unknown_mark) inside = !inside;
            if (!inside && (c == ' ' || c == '\t' || c == '\n'))
                end();
            else
                current += c, begun = true;
        }
    }
    void end() {
        if (begun) done.push_back(current);
        current.clear();
        begun = false;
    }
    // "${A[@]}": its members stay apart even inside of quotes.
    void members(const std::vector<std::string>& values, bool quoted) {
        for (std::size_t i = 0; i < values.size(); ++i) {
            if (i > 0) split ? end() : add(" ", true);
            add(values[i], quoted);
        }
    }
};

void BashValues::count(std::size_t bytes, std::size_t line) {
    bytes_ += bytes;
    if (bytes_ > max_expanded) refuse("{}:{}: texts grow beyond {} MiB", file_, line, max_expanded >> 20);
}

std::string BashValues::enter(std::string file) {
    self_.values = {file};
    return std::exchange(file_, std::move(file));
}

BashValues::Arguments BashValues::set_arguments(Arguments words) {
    for (std::size_t i = 1; arguments_ && i <= arguments_->size(); ++i) variables_.erase(fmt::format("{}", i));
    for (std::size_t i = 1; words && i <= words->size(); ++i)
        variables_[fmt::format("{}", i)].values = {(*words)[i - 1]};
    return std::exchange(arguments_, std::move(words));
}

const Variable* BashValues::find(const std::string& name) const {
    if (name == "0" || name == "BASH_SOURCE") return &self_;
    const auto found = variables_.find(name);
    return found == variables_.end() ? nullptr : &found->second;
}

void BashValues::set(const std::string& name, std::vector<std::string> values, bool array, bool append) {
    Variable& variable = variables_[name];
    if (!append) variable.values.clear();
    variable.array = variable.array || array;
    if (append && !array && !variable.array && !variable.values.empty() && !values.empty()) {
        variable.values.front() += values.front();
    } else {
        for (std::string& value : values) variable.values.push_back(std::move(value));
    }
    std::size_t bytes = 0;
    for (const std::string& value : variable.values) bytes += value.size();
    count(bytes, 0);
}

void BashValues::export_name(const std::string& name) { variables_[name].exported = true; }

std::vector<std::string> BashValues::words(const std::string& raw, std::size_t line) {
    Fields fields;
    expand(raw, line, fields, 0);
    fields.end();
    return std::move(fields.done);
}

std::string BashValues::text(const std::string& raw, std::size_t line) { return one(raw, line, 0); }

std::string BashValues::document(const std::string& lines, std::size_t line) {
    std::string quoted = "\"";
    for (std::size_t at = 0; at < lines.size(); ++at) {
        if (lines[at] == '"') quoted += '\\';
        quoted += lines[at];
        if (lines[at] == '\\' && at + 1 < lines.size() && lines[at + 1] != '"') quoted += lines[++at];
    }
    quoted += '"';
    return one(quoted, line, 0);
}

std::string BashValues::one(const std::string& raw, std::size_t line, int depth) {
    Fields fields;
    fields.split = false;
    expand(raw, line, fields, depth);
    return fields.current;
}

void BashValues::expand(const std::string& raw, std::size_t line, Fields& fields, int depth) {
    if (depth > max_depth) refuse("{}:{}: expansions nested too deep", file_, line);
    count(raw.size() + 1, line);
    bool quoted = false;
    for (std::size_t at = 0; at < raw.size();) {
        const char c = raw[at];
        if (c == unknown_mark) {
            const std::size_t end = std::min(raw.find(unknown_mark, at + 1), raw.size() - 1);
            fields.add(raw.substr(at, end - at + 1), true);
            at = end + 1;
        } else if (c == '"') {
            quoted = !quoted;
            if (quoted)
                fields.nothing = false;
            else
                fields.begun = fields.begun || !fields.nothing;
            ++at;
        } else if (c == '\'' && !quoted) {
            const std::size_t end = std::min(raw.find('\'', at + 1), raw.size());
            fields.add(raw.substr(at + 1, end - at - 1), true);
            at = end + 1;
        } else if (c == '\\' && at + 1 < raw.size()) {
            const bool kept = quoted && std::string("$`\"\\\n").find(raw[at + 1]) == std::string::npos;
            if (raw[at + 1] != '\n') fields.add(raw.substr(kept ? at : at + 1, kept ? 2 : 1), true);
            at += 2;
        } else if (c == '`') {
            const std::size_t end = past(raw, at + 1, '`', '`');
            fields.add(marked(raw.substr(at, end - at)), quoted);
            at = end;
        } else if (c == '$') {
            at = dollar(raw, at, quoted, line, fields, depth);
        } else {
            fields.add(std::string(1, c), true);
            ++at;
        }
    }
}

// Expands what begins with the $ at `at`; returns the place behind it.
std::size_t BashValues::dollar(const std::string& raw, std::size_t at, bool quoted, std::size_t line, Fields& fields,
                               int depth) {
    const char next = at + 1 < raw.size() ? raw[at + 1] : '\0';
    if (next == '(' && at + 2 < raw.size() && raw[at + 2] == '(') {
        const std::size_t end = past(raw, at + 2, '(', ')');
        const auto value = end >= at + 5 ? arithmetic(raw.substr(at + 3, end - at - 5), line, depth + 1) : std::nullopt;
        fields.add(value ? fmt::format("{}", *value) : marked(raw.substr(at, end - at)), quoted);
        return end;
    }
    if (next == '(') {
        const std::size_t end = past(raw, at + 2, '(', ')');
        if (const auto folder = own_folder(raw.substr(at + 2, end - at - 2), file_)) {
            fields.add(*folder, quoted);
            return end;
        }
        fields.add(marked(raw.substr(at, end - at)), quoted);
        return end;
    }
    if (next == '{') {
        const std::size_t end = past(raw, at + 2, '{', '}');
        parameter(raw.substr(at + 2, end > at + 3 ? end - at - 3 : 0), quoted, line, fields, depth + 1);
        return end;
    }
    std::size_t end = at + 1;
    while (end < raw.size() && in_name(raw[end]) &&
           !(end == at + 1 && std::isdigit(static_cast<unsigned char>(next)) != 0))
        ++end;
    if (end == at + 1 && end < raw.size() &&
        (std::string("@*#?$!-").find(next) != std::string::npos || std::isdigit(static_cast<unsigned char>(next)) != 0))
        ++end;
    if (end == at + 1) {
        fields.add("$", true);
        return end;
    }
    parameter(raw.substr(at + 1, end - at - 1), quoted, line, fields, depth + 1);
    return end;
}

// A name inside of ${ }, an index, and what follows both.
struct BashValues::Parameter {
    std::string name, rest;
    bool length = false, all = false; // #NAME; NAME[@]
    std::size_t index = 0;
    const Variable* variable = nullptr;

    bool set() const {
        return variable != nullptr && (all ? !variable->values.empty() : index < variable->values.size());
    }
    bool full() const { return set() && (all || !variable->values[index].empty()); }
    std::size_t size() const {
        if (!set()) return 0;
        return all ? variable->values.size() : variable->values[index].size();
    }
};

std::optional<BashValues::Parameter> BashValues::parsed(const std::string& inside, std::size_t line, int depth) {
    Parameter result;
    result.length = inside.size() > 1 && inside[0] == '#';
    const std::size_t begin = result.length ? 1 : 0;
    std::size_t at = begin;
    while (at < inside.size() && in_name(inside[at])) ++at;
    result.name = inside.substr(begin, at - begin);
    if (result.name.empty()) return std::nullopt;
    if (at < inside.size() && inside[at] == '[') {
        const std::size_t end = inside.find(']', at);
        if (end == std::string::npos) return std::nullopt;
        const std::string key = inside.substr(at + 1, end - at - 1);
        result.all = key == "@" || key == "*";
        const auto number = result.all ? std::optional<long long>(0) : arithmetic(key, line, depth + 1);
        if (!number || *number < 0) return std::nullopt;
        result.index = static_cast<std::size_t>(*number);
        at = end + 1;
    }
    result.variable = find(result.name);
    result.rest = inside.substr(at);
    return result;
}

void BashValues::put(const Parameter& parameter, bool quoted, std::size_t line, Fields& fields) {
    std::size_t bytes = 0;
    for (const std::string& value : parameter.variable->values) bytes += value.size();
    count(bytes, line);
    if (parameter.all)
        fields.members(parameter.variable->values, quoted);
    else
        fields.add(parameter.variable->values[parameter.index], quoted);
}

// What ${ } holds: a value, or what stands in for a missing one. All else is unknown.
void BashValues::parameter(const std::string& inside, bool quoted, std::size_t line, Fields& fields, int depth) {
    const std::string whole = marked(fmt::format("${{{}}}", inside));
    if (inside == "@" || inside == "*" || inside == "@:1") { // A script without arguments that are known has none.
        fields.nothing = !arguments_ || arguments_->empty();
        return fields.nothing ? void() : fields.members(*arguments_, quoted);
    }
    if (inside == "#") return fields.add(fmt::format("{}", arguments_ ? arguments_->size() : 0), quoted);
    const std::optional<Parameter> found = parsed(inside, line, depth);
    if (!found) return fields.add(whole, quoted);
    const Parameter& p = *found;
    if (p.length) return fields.add(fmt::format("{}", p.size()), quoted);
    if (p.rest.empty()) {
        if (p.set()) return put(p, quoted, line, fields);
        fields.nothing = p.all || (p.variable != nullptr && p.variable->array); // An array may have no members.
        if (!fields.nothing) fields.add(whole, quoted);
        return;
    }
    const std::size_t colon = p.rest[0] == ':' ? 1 : 0;
    const char sign = p.rest.size() > colon ? p.rest[colon] : '\0';
    const std::string word = p.rest.size() > colon ? p.rest.substr(colon + 1) : std::string();
    const bool given = colon == 1 ? p.full() : p.set();
    const auto instead = [&] { expand(quoted ? fmt::format("\"{}\"", word) : word, line, fields, depth); };
    if (sign == '-' || sign == '=' || sign == '?') {
        if (given) return put(p, quoted, line, fields);
        if (sign == '?') return fields.add(whole, quoted);
        if (sign == '=') set(p.name, {one(word, line, depth)}, false, false);
        return instead();
    }
    if (sign == '+') {
        if (given) instead();
        return;
    }
    if (p.rest != ",," || !p.full() || p.all) return fields.add(whole, quoted);
    std::string lower = p.variable->values[p.index];
    for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    fields.add(lower, quoted);
}

} // namespace moe::tools
