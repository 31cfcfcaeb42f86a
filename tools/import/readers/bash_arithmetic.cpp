// The arithmetic of $(( )): whole numbers, names of variables, + - * / % and comparisons, in brackets.
#include "planner/base/error.hpp"
#include "tools/import/readers/bash_values.hpp"

#include <cctype>
#include <charconv>
#include <cmath>

namespace moe::tools {
namespace {

constexpr long long most = 1'000'000'000'000LL; // bound that no product of two exceeds by much more
constexpr int max_brackets = 30;

class Calculator {
public:
    explicit Calculator(const std::string& text) : text_(text) {}

    std::optional<long long> run() {
        const auto value = compared(0);
        skip();
        if (at_ != text_.size()) return std::nullopt;
        return value;
    }

private:
    using Number = std::optional<long long>;

    void skip() {
        while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_])) != 0) ++at_;
    }
    bool take(const char* sign) {
        skip();
        const std::string word = sign;
        if (text_.compare(at_, word.size(), word) != 0) return false;
        at_ += word.size();
        return true;
    }
    static Number bounded(Number value) { return value && *value <= most && *value >= -most ? value : std::nullopt; }

    Number compared(int depth) {
        Number left = sum(depth);
        for (const char* sign : {"==", "!=", "<=", ">=", "<", ">"}) {
            if (!take(sign)) continue;
            const Number right = sum(depth);
            if (!left || !right) return std::nullopt;
            const std::string s = sign;
            const bool holds = s == "=="   ? *left == *right
                               : s == "!=" ? *left != *right
                               : s == "<=" ? *left <= *right
                               : s == ">=" ? *left >= *right
                               : s == "<"  ? *left < *right
                                           : *left > *right;
            return holds ? 1 : 0;
        }
        return left;
    }
    Number sum(int depth) {
        Number left = product(depth);
        for (;;) {
            const bool plus = take("+");
            if (!plus && !take("-")) return left;
            const Number right = product(depth);
            if (!left || !right) return std::nullopt;
            left = bounded(plus ? *left + *right : *left - *right);
        }
    }
    Number product(int depth) {
        Number left = factor(depth);
        for (;;) {
            skip();
            const char sign = at_ < text_.size() ? text_[at_] : '\0';
            if (sign != '*' && sign != '/' && sign != '%') return left;
            ++at_;
            const Number right = factor(depth);
            if (!left || !right || (sign != '*' && *right == 0)) return std::nullopt;
            // Both are at most a million millions, so that the product is tried in floating point first.
            if (sign == '*' && std::abs(static_cast<double>(*left) * static_cast<double>(*right)) > double(most))
                return std::nullopt;
            left = sign == '*' ? *left * *right : sign == '/' ? *left / *right : *left % *right;
        }
    }
    Number factor(int depth) {
        if (depth > max_brackets) return std::nullopt;
        if (take("-")) {
            const Number value = factor(depth + 1);
            return value ? Number(-*value) : std::nullopt;
        }
        if (take("(")) {
            const Number value = compared(depth + 1);
            return take(")") ? value : std::nullopt;
        }
        skip();
        long long value = 0;
        const char *begin = text_.data() + at_, *end = text_.data() + text_.size();
        const auto [last, error] = std::from_chars(begin, end, value);
        if (error != std::errc{} || last == begin) return std::nullopt;
        at_ += static_cast<std::size_t>(last - begin);
        return bounded(value);
    }

    std::string text_;
    std::size_t at_ = 0;
};

} // namespace

std::optional<long long> BashValues::arithmetic(const std::string& expression, std::size_t line, int depth) {
    // Bare names are variables; $NAME and ${NAME} are put in first.
    std::string plain;
    const std::string expanded = one(expression, line, depth + 1);
    if (has_unknown(expanded)) return std::nullopt;
    for (std::size_t at = 0; at < expanded.size();) {
        if (std::isalpha(static_cast<unsigned char>(expanded[at])) == 0 && expanded[at] != '_') {
            plain += expanded[at++];
            continue;
        }
        std::size_t end = at;
        while (end < expanded.size() &&
               (std::isalnum(static_cast<unsigned char>(expanded[end])) != 0 || expanded[end] == '_'))
            ++end;
        const auto found = variables_.find(expanded.substr(at, end - at));
        if (found == variables_.end() || found->second.values.empty()) return std::nullopt;
        plain += found->second.values.front();
        at = end;
    }
    return Calculator(plain).run();
}

} // namespace moe::tools
