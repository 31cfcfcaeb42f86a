// A condition is parsed by its connectives from the weakest down: or, and, not, one comparison.
#include "tools/import/readers/bash_test.hpp"

#include "tools/import/readers/setting.hpp"

#include <algorithm>
#include <charconv>
#include <optional>

namespace moe::tools {
namespace {

Truth of(bool holds) { return holds ? Truth::yes : Truth::no; }

std::optional<long long> number(const std::string& text) {
    long long value = 0;
    const char* end = text.data() + text.size();
    const auto [last, error] = std::from_chars(text.data(), end, value);
    if (error != std::errc{} || last != end) return std::nullopt;
    return value;
}

Truth numbers(const std::string& left, const std::string& sign, const std::string& right) {
    const auto a = number(left), b = number(right);
    if (!a || !b) return Truth::unknown;
    if (sign == "-eq") return of(*a == *b);
    if (sign == "-ne") return of(*a != *b);
    if (sign == "-lt") return of(*a < *b);
    if (sign == "-le") return of(*a <= *b);
    if (sign == "-gt") return of(*a > *b);
    return of(*a >= *b);
}

// A variable that nothing sets is empty to a test.
std::string value_of(const std::string& word) {
    if (word.size() > 3 && word.front() == unknown_mark && word[1] == '$' && word[2] == '{' &&
        word.find(unknown_mark, 1) == word.size() - 1)
        return {};
    return word;
}

Truth compared(const std::vector<std::string>& words, std::size_t begin, std::size_t end) {
    const std::size_t count = end - begin;
    if (count == 0) return Truth::no;
    if (words[begin] == "!") return opposite(compared(words, begin + 1, end));
    const std::string left = value_of(words[begin]);
    if (count == 1) return has_unknown(left) ? Truth::unknown : of(!left.empty());
    const std::string right = value_of(words[begin + 1]);
    if (count == 2) {
        if (left != "-n" && left != "-z") return Truth::unknown;
        if (has_unknown(right)) return Truth::unknown;
        return of(right.empty() == (left == "-z"));
    }
    if (count != 3) return Truth::unknown;
    const std::string third = value_of(words[begin + 2]);
    if (has_unknown(left) || has_unknown(third)) return Truth::unknown;
    const std::string& sign = words[begin + 1];
    if (sign == "=" || sign == "==") return of(matches_pattern(left, third));
    if (sign == "!=") return of(!matches_pattern(left, third));
    for (const char* known : {"-eq", "-ne", "-lt", "-le", "-gt", "-ge"})
        if (sign == known) return numbers(left, sign, third);
    return Truth::unknown;
}

Truth both(Truth a, Truth b) {
    if (a == Truth::no || b == Truth::no) return Truth::no;
    return a == Truth::yes && b == Truth::yes ? Truth::yes : Truth::unknown;
}

Truth all_of(const std::vector<std::string>& words, std::size_t begin, std::size_t end) {
    Truth result = Truth::yes;
    for (std::size_t at = begin, from = begin; at <= end; ++at)
        if (at == end || words[at] == "&&" || words[at] == "-a") {
            result = both(result, compared(words, from, at));
            from = at + 1;
        }
    return result;
}

} // namespace

Truth opposite(Truth truth) {
    if (truth == Truth::unknown) return truth;
    return truth == Truth::yes ? Truth::no : Truth::yes;
}

Truth test_words(const std::vector<std::string>& words) {
    Truth result = Truth::no;
    for (std::size_t at = 0, from = 0; at <= words.size(); ++at)
        if (at == words.size() || words[at] == "||" || words[at] == "-o") {
            result = opposite(both(opposite(result), opposite(all_of(words, from, at))));
            from = at + 1;
        }
    return result;
}

bool matches_pattern(const std::string& text, const std::string& pattern) {
    // The last * and the place in the text that it has reached: only that one need be tried again.
    std::size_t at = 0, in = 0, star = std::string::npos, reached = 0;
    while (at < text.size()) {
        if (in < pattern.size() && pattern[in] == '*') {
            star = in++;
            reached = at;
        } else if (in < pattern.size() && (pattern[in] == '?' || pattern[in] == text[at])) {
            ++in;
            ++at;
        } else if (star != std::string::npos) {
            in = star + 1;
            at = ++reached;
        } else {
            return false;
        }
    }
    while (in < pattern.size() && pattern[in] == '*') ++in;
    return in == pattern.size();
}

} // namespace moe::tools
