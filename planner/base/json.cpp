// A recursive-descent parser that fills nlohmann's trees, with bounds and messages of its own.
#include "planner/base/json.hpp"

#include "planner/base/digit.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/names.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <unordered_set>

namespace moe {
namespace {

void append_utf8(std::string& text, unsigned code) {
    const auto put = [&text](unsigned byte) { text += static_cast<char>(byte); };
    const auto tail = [&](int bits) { put(0x80U | (code >> bits & 0x3FU)); };
    if (code < 0x80) {
        put(code);
    } else if (code < 0x800) {
        put(0xC0U | code >> 6), tail(0);
    } else if (code < 0x10000) {
        put(0xE0U | code >> 12), tail(6), tail(0);
    } else {
        put(0xF0U | code >> 18), tail(12), tail(6), tail(0);
    }
}

template <class Json>
class JsonParser {
public:
    JsonParser(std::string_view text, const std::string& place, int deepest)
        : text_(text), place_(place), deepest_(deepest) {
        if (text_.starts_with("\xEF\xBB\xBF")) at_ = 3;
    }

    Json whole() {
        Json result = value(1);
        skip_blanks();
        if (at_ < text_.size()) refuse_here("text behind the end of the document");
        return result;
    }

private:
    [[noreturn]] void refuse_here(const std::string& why) const {
        if (text_.find_first_not_of(" \t\r\n") == std::string_view::npos)
            refuse("{}: not valid JSON: the text is empty", place_);
        const std::string_view before = text_.substr(0, std::min(at_, text_.size()));
        const auto line = 1 + std::count(before.begin(), before.end(), '\n');
        const std::size_t column = at_ - (before.rfind('\n') + 1) + 1; // npos + 1 is 0
        refuse("{}: not valid JSON: {} at line {}, column {}", place_, why, line, column);
    }
    // What stands here, for messages.
    std::string found() const {
        if (at_ >= text_.size()) return "the end of the text";
        const std::size_t end = std::min(text_.find_first_of(" \t\r\n,:[]{}\"", at_ + 1), text_.size());
        constexpr std::size_t longest = 20;
        return fmt::format("'{}'", shown(text_.substr(at_, std::min(end - at_, longest))));
    }
    char here() const { return at_ < text_.size() ? text_[at_] : '\0'; }
    void skip_blanks() { at_ = std::min(text_.find_first_not_of(" \t\r\n", at_), text_.size()); }
    bool skip(std::string_view word) {
        if (!text_.substr(at_).starts_with(word)) return false;
        at_ += word.size();
        return true;
    }

    Json value(int depth) {
        skip_blanks();
        switch (here()) {
        case '{':
            return object(depth);
        case '[':
            return array(depth);
        case '"':
            return Json(string());
        default:
            break;
        }
        constexpr double infinity = std::numeric_limits<double>::infinity();
        if (is_digit(here()) || (here() == '-' && !text_.substr(at_).starts_with("-I"))) return number();
        if (skip("true")) return Json(true);
        if (skip("false")) return Json(false);
        if (skip("null")) return Json(nullptr);
        if (skip("NaN")) return Json(std::numeric_limits<double>::quiet_NaN());
        if (skip("Infinity")) return Json(infinity);
        if (skip("-Infinity")) return Json(-infinity);
        refuse_here("a value was expected, found " + found());
    }

    void enter(int depth) {
        if (depth > deepest_) refuse_here(fmt::format("nested more than {} deep", deepest_));
        ++at_;
        skip_blanks();
    }
    // Whether another element follows; steps over the comma, or over what closes.
    bool more(char closing) {
        skip_blanks();
        if (here() != ',' && here() != closing)
            refuse_here(fmt::format("',' or '{}' was expected, found {}", closing, found()));
        return text_[at_++] == ',';
    }

    Json array(int depth) {
        enter(depth);
        typename Json::array_t elements;
        if (here() == ']') {
            ++at_;
            return Json(std::move(elements));
        }
        do elements.push_back(value(depth + 1));
        while (more(']'));
        return Json(std::move(elements));
    }

    Json object(int depth) {
        enter(depth);
        typename Json::object_t fields;
        std::unordered_set<std::string> names;
        if (here() == '}') {
            ++at_;
            return Json(std::move(fields));
        }
        do {
            skip_blanks();
            if (here() != '"') refuse_here("a field's name in quotes was expected, found " + found());
            const std::size_t begin = at_;
            std::string name = string();
            if (!names.insert(name).second) {
                at_ = begin;
                refuse_here(fmt::format("the field \"{}\" stands twice in one object", shown(name)));
            }
            skip_blanks();
            if (!skip(":")) refuse_here("':' was expected, found " + found());
            Json member = value(depth + 1);
            if constexpr (std::is_same_v<Json, nlohmann::ordered_json>)
                // emplace() of ordered_map searches all fields before it; this name is known to be new.
                static_cast<typename Json::object_t::Container&>(fields).emplace_back(std::move(name),
                                                                                      std::move(member));
            else
                fields.emplace(std::move(name), std::move(member));
        } while (more('}'));
        return Json(std::move(fields));
    }

    Json number() {
        const std::size_t begin = at_;
        const auto digits = [this] {
            if (!is_digit(here())) refuse_here("a digit was expected, found " + found());
            while (is_digit(here())) ++at_;
        };
        skip("-");
        if (here() == '0' && at_ + 1 < text_.size() && is_digit(text_[at_ + 1])) refuse_here("a number begins with 0");
        digits();
        const bool whole = here() != '.' && here() != 'e' && here() != 'E';
        if (skip(".")) digits();
        if (skip("e") || skip("E")) {
            if (!skip("+")) skip("-");
            digits();
        }
        const char *first = text_.data() + begin, *last = text_.data() + at_;
        if (whole) {
            std::uint64_t plain = 0;
            std::int64_t negative = 0;
            if (*first != '-' && std::from_chars(first, last, plain).ec == std::errc{}) return Json(plain);
            if (*first == '-' && std::from_chars(first, last, negative).ec == std::errc{}) return Json(negative);
        }
        double real = 0.0;
        const auto [end, error] = std::from_chars(first, last, real);
        if (error == std::errc::result_out_of_range) {
            // Numbers that are too small to tell from 0 are 0; from_chars says the same of both.
            real = std::strtod(std::string(first, last).c_str(), nullptr);
            if (std::isinf(real)) {
                at_ = begin;
                refuse_here(fmt::format("the number {} is beyond 1.8e308", found()));
            }
        }
        return Json(real);
    }

    unsigned four_digits() {
        unsigned code = 0;
        const char *first = text_.data() + at_, *last = text_.data() + std::min(at_ + 4, text_.size());
        const auto [end, error] = std::from_chars(first, last, code, 16);
        if (error != std::errc{} || end != first + 4) refuse_here("\\u without four hexadecimal digits");
        at_ += 4;
        return code;
    }
    void escape(std::string& out) {
        static constexpr std::string_view names = "\"\\/bfnrt", letters = "\"\\/\b\f\n\r\t";
        const char name = here();
        if (const std::size_t known = name == '\0' ? std::string_view::npos : names.find(name);
            known != std::string_view::npos) {
            ++at_;
            out += letters[known];
            return;
        }
        if (!skip("u")) refuse_here("an unknown escape in a string");
        unsigned code = four_digits();
        const bool high = code >= 0xD800 && code < 0xDC00, low = code >= 0xDC00 && code < 0xE000;
        if (high && skip("\\u")) {
            const unsigned second = four_digits();
            if (second < 0xDC00 || second >= 0xE000) refuse_here("half a surrogate pair in a string");
            code = 0x10000 + ((code - 0xD800) << 10) + (second - 0xDC00);
        } else if (high || low) {
            refuse_here("half a surrogate pair in a string");
        }
        append_utf8(out, code);
    }
    std::string string() {
        std::string out;
        for (++at_; here() != '"';) {
            if (at_ >= text_.size()) refuse_here("a string that is never closed");
            if (skip("\\")) {
                escape(out);
                continue;
            }
            if (static_cast<unsigned char>(here()) < 0x20) refuse_here("a control character in a string");
            const std::size_t length = utf8_length(text_.substr(at_));
            if (length == 0) refuse_here("bytes that are no UTF-8");
            out.append(text_, at_, length);
            at_ += length;
        }
        ++at_;
        return out;
    }

    std::string_view text_;
    const std::string& place_;
    int deepest_;
    std::size_t at_ = 0;
};

template <class Json>
void write_text(const Json& value, std::string& out) {
    if (value.is_object()) {
        char before = '{';
        for (const auto& [name, member] : value.items()) {
            out += before;
            out += Json(name).dump(-1, ' ', false, Json::error_handler_t::replace) + ":";
            write_text(member, out);
            before = ',';
        }
        out += value.empty() ? "{}" : "}";
    } else if (value.is_array()) {
        char before = '[';
        for (const Json& element : value) {
            out += before;
            write_text(element, out);
            before = ',';
        }
        out += value.empty() ? "[]" : "]";
    } else if (value.is_number_float() && !std::isfinite(value.template get<double>())) {
        const auto number = value.template get<double>();
        out += std::isnan(number) ? "NaN" : number < 0.0 ? "-Infinity" : "Infinity";
    } else {
        out += value.dump(-1, ' ', false, Json::error_handler_t::replace);
    }
}

} // namespace

template <class Json>
Json parse_json(std::string_view text, const std::string& place, const JsonLimits& limits) {
    if (text.size() > limits.bytes)
        refuse("{}: {} MiB of JSON: at most {} MiB are read", place, text.size() >> 20, limits.bytes >> 20);
    return JsonParser<Json>(text, place, limits.depth).whole();
}

template <class Json>
Json load_json(const std::string& path, const JsonLimits& limits) {
    return parse_json<Json>(read_file(path, limits.bytes), path, limits);
}

template <class Json>
std::string json_text(const Json& value) {
    std::string out;
    write_text(value, out);
    return out;
}

template <class Json>
std::string shown_json(const Json& value) {
    if (value.is_object()) return fmt::format("an object of {} fields", value.size());
    if (value.is_array()) return fmt::format("an array of {} elements", value.size());
    return shown(json_text(value));
}

double rounded_to(double value, int digits) {
    double result = 0.0;
    const std::string text = fmt::format("{:.{}g}", value, digits);
    std::from_chars(text.data(), text.data() + text.size(), result);
    return result;
}

template nlohmann::json parse_json(std::string_view, const std::string&, const JsonLimits&);
template nlohmann::ordered_json parse_json(std::string_view, const std::string&, const JsonLimits&);
template nlohmann::json load_json(const std::string&, const JsonLimits&);
template nlohmann::ordered_json load_json(const std::string&, const JsonLimits&);
template std::string json_text(const nlohmann::json&);
template std::string json_text(const nlohmann::ordered_json&);
template std::string shown_json(const nlohmann::json&);
template std::string shown_json(const nlohmann::ordered_json&);

} // namespace moe
