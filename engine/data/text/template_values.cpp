// What Jinja and Python do with the values that chat templates meet.
#include "engine/data/text/template_values.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string_view>

namespace moe::data::chat {
namespace {

std::size_t character_bytes(unsigned char first) { return first < 0xC0 ? 1 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4; }

std::vector<std::string> characters(const std::string& text) {
    std::vector<std::string> out;
    for (std::size_t at = 0; at < text.size(); at += character_bytes(static_cast<unsigned char>(text[at])))
        out.push_back(text.substr(at, character_bytes(static_cast<unsigned char>(text[at]))));
    return out;
}

// Python's white space (str.isspace).
bool is_space(const std::string& c) {
    static constexpr std::string_view wide[] = {"\u0085", "\u00a0", "\u1680", "\u2000", "\u2001", "\u2002", "\u2003",
                                                "\u2004", "\u2005", "\u2006", "\u2007", "\u2008", "\u2009", "\u200a",
                                                "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"};
    if (c.size() == 1) return c[0] == ' ' || (c[0] >= '\t' && c[0] <= '\r') || (c[0] >= '\x1c' && c[0] <= '\x1f');
    return std::find(std::begin(wide), std::end(wide), c) != std::end(wide);
}

// Without the given characters, white space where there are none, at the ends asked for.
std::string stripped(const std::string& text, const std::optional<std::string>& taken, bool left, bool right) {
    const std::vector<std::string> all = characters(text);
    const std::vector<std::string> set = taken ? characters(*taken) : std::vector<std::string>();
    const auto goes = [&](const std::string& c) {
        return taken ? std::find(set.begin(), set.end(), c) != set.end() : is_space(c);
    };
    auto first = all.begin(), last = all.end();
    while (left && first != last && goes(*first)) ++first;
    while (right && first != last && goes(*(last - 1))) --last;
    std::string out;
    for (; first != last; ++first) out += *first;
    return out;
}

std::string replaced(const std::string& text, const std::string& from, const std::string& to) {
    std::string out;
    for (std::size_t at = 0;;) {
        const std::size_t next = from.empty() ? std::string::npos : text.find(from, at);
        out.append(text, at, next - at);
        if (next == std::string::npos) return out;
        out += to;
        at = next + from.size();
    }
}

Json split(const std::string& text, const std::vector<Json>& arguments) {
    Json parts = Json::array();
    if (arguments.empty() || arguments[0].is_null()) {
        std::string word;
        for (const std::string& c : characters(text)) {
            if (!is_space(c)) {
                word += c;
            } else if (!word.empty()) {
                parts.push_back(std::move(word));
                word.clear();
            }
        }
        if (!word.empty()) parts.push_back(word);
        return parts;
    }
    const auto by = arguments[0].get<std::string>();
    std::int64_t left = arguments.size() > 1 ? arguments[1].get<std::int64_t>() : -1;
    for (std::size_t at = 0;;) {
        const std::size_t next = left == 0 ? std::string::npos : text.find(by, at);
        parts.push_back(text.substr(at, next - at));
        if (next == std::string::npos) return parts;
        at = next + by.size();
        --left;
    }
}

std::string cased(std::string text, bool upper) {
    for (char& c : text)
        if (upper ? c >= 'a' && c <= 'z' : c >= 'A' && c <= 'Z') c = static_cast<char>(c ^ 0x20);
    return text;
}

const char* kind(const Json& value) {
    if (is_undefined(value)) return "what is undefined";
    if (value.is_string()) return "a string";
    if (value.is_object()) return "a mapping";
    if (value.is_array()) return "a list";
    if (value.is_boolean()) return "a truth value";
    return value.is_null() ? "none" : "a number";
}

std::int64_t length(const Json& value, const std::string& place) {
    if (value.is_string()) return static_cast<std::int64_t>(characters(value.get<std::string>()).size());
    if (!value.is_array() && !value.is_object()) refuse("{}: length of {}", place, kind(value));
    return static_cast<std::int64_t>(value.size());
}

bool strings(const std::vector<Json>& values) {
    return std::all_of(values.begin(), values.end(), [](const Json& v) { return v.is_string(); });
}

// Python's // and %: the quotient is rounded down. The divisor is not 0.
std::int64_t floored(std::int64_t a, std::int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0); }

std::int64_t whole(std::int64_t a, std::int64_t b, char op, const std::string& place) {
    std::int64_t out = 0;
    const bool beyond = op == '+'   ? __builtin_add_overflow(a, b, &out)
                        : op == '-' ? __builtin_sub_overflow(a, b, &out)
                                    : __builtin_mul_overflow(a, b, &out);
    if (beyond) refuse("{}: {} {} {} is beyond 64 bits", place, a, op, b);
    return out;
}

// The items whose attribute passes a test: selectattr(attribute[, test[, operand]]).
Json selected(const Json& value, const std::vector<Json>& arguments, bool wanted, const std::string& place) {
    Json list = Json::array();
    for (const Json& item : value.is_null() ? std::vector<Json>() : items(value, place)) {
        const Json attribute = part(item, arguments[0], place);
        const std::string name = arguments.size() > 1 ? text_of(arguments[1], place) : "";
        const bool equal = name == "equalto" || name == "eq" || name == "==";
        const bool passes = arguments.size() == 1            ? truth(attribute)
                            : equal && arguments.size() == 3 ? truth(binary("==", attribute, arguments[2], place))
                                                             : test(name, attribute, place);
        if (passes == wanted) list.push_back(item);
    }
    return list;
}

} // namespace

bool truth(const Json& value) {
    if (is_undefined(value) || value.is_null()) return false;
    if (value.is_boolean()) return value.get<bool>();
    if (value.is_string()) return !value.get_ref<const std::string&>().empty();
    if (value.is_number()) return value.get<double>() != 0.0; // NOLINT: exactly zero is meant
    return !value.empty();
}

std::string text_of(const Json& value, const std::string& place) {
    if (is_undefined(value)) return "";
    if (value.is_string()) return value.get<std::string>();
    if (value.is_null()) return "None";
    if (value.is_boolean()) return value.get<bool>() ? "True" : "False";
    if (value.is_number()) return value.dump();
    refuse("{}: writes {} as it is: only through tojson", place, kind(value));
}

std::string python_json(const Json& value) {
    if (!value.is_structured()) return value.dump();
    std::string out;
    for (const auto& [key, item] : value.items()) {
        out += out.empty() ? "" : ", ";
        if (value.is_object()) out += Json(key).dump() + ": ";
        out += python_json(item);
    }
    return value.is_object() ? '{' + out + '}' : '[' + out + ']';
}

Json part(const Json& value, const Json& key, const std::string& place) {
    if (is_undefined(value)) refuse("{}: {} of what is undefined", place, shown(key.dump()));
    if (key.is_string()) {
        if (!value.is_object()) return undefined();
        const auto found = value.find(key.get<std::string>());
        return found == value.end() ? undefined() : *found;
    }
    if (!key.is_number_integer() || (!value.is_array() && !value.is_string()))
        refuse("{}: place {} of {}", place, shown(key.dump()), kind(value));
    const std::int64_t size = length(value, place);
    std::int64_t at = key.get<std::int64_t>();
    if (at < 0) at += size;
    if (at < 0 || at >= size) return undefined();
    if (value.is_array()) return value[static_cast<std::size_t>(at)];
    return characters(value.get<std::string>())[static_cast<std::size_t>(at)];
}

Json slice(const Json& value, const Json& first, const Json& last, const Json& step, const std::string& place) {
    if (!value.is_array() && !value.is_string()) refuse("{}: a slice of {}", place, kind(value));
    const std::int64_t size = length(value, place);
    const std::int64_t by = step.is_number_integer() ? step.get<std::int64_t>() : 1;
    if (by == 0) refuse("{}: a slice with step 0", place);
    const auto bound = [&](const Json& given, std::int64_t fallback) {
        if (!given.is_number_integer()) return fallback;
        std::int64_t at = given.get<std::int64_t>();
        if (at < 0) at = std::max<std::int64_t>(at, -size - 1) + size;
        return std::clamp<std::int64_t>(at, by < 0 ? -1 : 0, by < 0 ? size - 1 : size);
    };
    const std::int64_t from = bound(first, by < 0 ? size - 1 : 0), to = bound(last, by < 0 ? -1 : size);
    const std::vector<std::string> all =
        value.is_string() ? characters(value.get<std::string>()) : std::vector<std::string>();
    Json list = Json::array();
    std::string text;
    for (std::int64_t at = from; by < 0 ? at > to : at < to;) {
        if (value.is_array())
            list.push_back(value[static_cast<std::size_t>(at)]);
        else
            text += all[static_cast<std::size_t>(at)];
        if (by > size || by < -size) break;
        at += by;
    }
    return value.is_array() ? list : Json(text);
}

bool contains(const Json& value, const Json& item, const std::string& place) {
    if (value.is_string() && item.is_string())
        return value.get_ref<const std::string&>().find(item.get_ref<const std::string&>()) != std::string::npos;
    if (value.is_object()) return item.is_string() && value.contains(item.get<std::string>());
    if (value.is_array()) return std::find(value.begin(), value.end(), item) != value.end();
    refuse("{}: {} in {}", place, kind(item), kind(value));
}

Json binary(const std::string& op, const Json& a, const Json& b, const std::string& place) {
    if (op == "==" || op == "!=") {
        const bool both = !is_undefined(a) && !is_undefined(b);
        return (both ? a == b : is_undefined(a) == is_undefined(b)) == (op == "==");
    }
    if (op == "~") return text_of(a, place) + text_of(b, place);
    if (op == "+" && a.is_string() && b.is_string()) return a.get<std::string>() + b.get<std::string>();
    if (op == "+" && a.is_array() && b.is_array()) {
        Json list = a;
        for (const Json& item : b) list.push_back(item);
        return list;
    }
    if (op[0] == '<' || op[0] == '>') {
        const bool fit = (a.is_number() && b.is_number()) || (a.is_string() && b.is_string());
        if (!fit) refuse("{}: {} {} {}", place, kind(a), op, kind(b));
        return op == "<" ? a < b : op == ">" ? b < a : op == "<=" ? a <= b : b <= a;
    }
    if (!a.is_number() || !b.is_number()) refuse("{}: {} {} {}", place, kind(a), op, kind(b));
    const bool integers = a.is_number_integer() && b.is_number_integer();
    if (op == "//" || op == "%") {
        const std::int64_t y = integers ? b.get<std::int64_t>() : 0, x = integers ? a.get<std::int64_t>() : 0;
        if (y == 0 || y == -1)
            refuse("{}: {} {} {}: only whole numbers by those above 0 or below -1", place, a.dump(), op, b.dump());
        return op == "//" ? floored(x, y) : x - floored(x, y) * y;
    }
    if (integers && op != "/") return whole(a.get<std::int64_t>(), b.get<std::int64_t>(), op[0], place);
    const double x = a.get<double>(), y = b.get<double>();
    return op == "+" ? x + y : op == "-" ? x - y : op == "*" ? x * y : x / y;
}

Json filter(const std::string& name, const Json& value, const std::vector<Json>& arguments, const std::string& place) {
    if (name == "default" || name == "d") {
        if (arguments.empty()) refuse("{}: filter {} without a value", place, name);
        const bool falsy = arguments.size() > 1 && truth(arguments[1]);
        return is_undefined(value) || (falsy && !truth(value)) ? arguments[0] : value;
    }
    if (is_undefined(value)) refuse("{}: filter {} of what is undefined", place, name);
    if (name == "length" || name == "count") return length(value, place);
    if (name == "tojson" && arguments.empty()) return python_json(value);
    if (name == "tojson" && arguments.size() == 1 && arguments[0].is_number_integer())
        return value.dump(std::clamp<int>(arguments[0].get<int>(), 0, 16));
    if ((name == "selectattr" || name == "rejectattr") && !arguments.empty() && arguments[0].is_string())
        return selected(value, arguments, name == "selectattr", place);
    if (name == "string") return text_of(value, place);
    if (name == "list") return items(value, place);
    if (name == "items" && value.is_object()) return method("items", value, {}, place);
    if ((name == "first" || name == "last") && value.is_array())
        return value.empty() ? undefined() : name == "first" ? value.front() : value.back();
    if (name == "join" && value.is_array()) {
        std::string text;
        for (std::size_t i = 0; i < value.size(); ++i)
            text += (i > 0 && !arguments.empty() ? text_of(arguments[0], place) : "") + text_of(value[i], place);
        return text;
    }
    if (name == "trim") return method("strip", value, arguments, place);
    if ((name == "upper" || name == "lower" || name == "replace") && value.is_string())
        return method(name, value, arguments, place);
    refuse("{}: the filter {} of {} with {} arguments is not known", place, shown(name), kind(value), arguments.size());
}

bool test(const std::string& name, const Json& value, const std::string& place) {
    if (name == "defined") return !is_undefined(value);
    if (name == "undefined") return is_undefined(value);
    if (name == "none") return value.is_null();
    if (name == "string") return value.is_string();
    if (name == "mapping") return value.is_object();
    if (name == "iterable" || name == "sequence") return value.is_string() || value.is_structured();
    if (name == "number") return value.is_number() || value.is_boolean();
    if (name == "integer") return value.is_number_integer();
    if (name == "boolean") return value.is_boolean();
    if (name == "true") return value.is_boolean() && value.get<bool>();
    if (name == "false") return value.is_boolean() && !value.get<bool>();
    if ((name == "odd" || name == "even") && value.is_number_integer())
        return (value.get<std::int64_t>() % 2 != 0) == (name == "odd");
    refuse("{}: the test {} of {} is not known", place, shown(name), kind(value));
}

Json method(const std::string& name, const Json& value, const std::vector<Json>& arguments, const std::string& place) {
    if (value.is_object()) {
        if (name == "get" && !arguments.empty() && arguments[0].is_string()) {
            const auto found = value.find(arguments[0].get<std::string>());
            return found != value.end() ? *found : arguments.size() > 1 ? arguments[1] : Json();
        }
        Json list = Json::array();
        for (const auto& [key, item] : value.items())
            list.push_back(name == "items" ? Json::array({key, item}) : name == "keys" ? Json(key) : item);
        if (name == "items" || name == "keys" || name == "values") return list;
    }
    if (value.is_string() && (strings(arguments) || name == "split")) {
        const auto text = value.get<std::string>();
        const std::size_t count = arguments.size();
        if (count <= 1 && (name == "strip" || name == "lstrip" || name == "rstrip"))
            return stripped(text, count > 0 ? std::optional(arguments[0].get<std::string>()) : std::nullopt,
                            name != "rstrip", name != "lstrip");
        if (count == 1 && name == "startswith") return text.starts_with(arguments[0].get<std::string>());
        if (count == 1 && name == "endswith") return text.ends_with(arguments[0].get<std::string>());
        if (count == 2 && name == "replace")
            return replaced(text, arguments[0].get<std::string>(), arguments[1].get<std::string>());
        if (count == 0 && (name == "upper" || name == "lower")) return cased(text, name == "upper");
        const bool by = count == 0 || arguments[0].is_null() ||
                        (arguments[0].is_string() && !arguments[0].get_ref<const std::string&>().empty());
        if (name == "split" && by && (count < 2 || (count == 2 && arguments[1].is_number_integer())))
            return split(text, arguments);
    }
    refuse("{}: the method {} of {} with {} arguments is not known", place, shown(name), kind(value), arguments.size());
}

std::vector<Json> items(const Json& value, const std::string& place) {
    std::vector<Json> list;
    if (value.is_array()) {
        list.assign(value.begin(), value.end());
    } else if (value.is_object()) {
        for (const auto& [key, item] : value.items()) list.emplace_back(key);
    } else if (value.is_string()) {
        for (std::string& c : characters(value.get<std::string>())) list.emplace_back(std::move(c));
    } else if (!is_undefined(value)) {
        refuse("{}: a loop over {}", place, kind(value));
    }
    return list;
}

} // namespace moe::data::chat
