// Cuts a chat template into words.
#include "engine/data/text/template_lexer.hpp"

#include "planner/base/digit.hpp"
#include "planner/base/error.hpp"

#include <algorithm>
#include <string_view>

namespace moe::data::chat {
namespace {

constexpr std::size_t most_words = 1000; // in a tag: functions of expressions call each other
constexpr std::string_view spaces = " \t\n\r\v\f";

bool letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

class Lexer {
public:
    Lexer(const std::string& source, const std::string& place) : source_(source), place_(place) {
        if (source_.ends_with('\n')) source_.pop_back(); // Jinja's keep_trailing_newline is off.
    }

    std::vector<Word> words() {
        while (at_ < source_.size()) {
            std::size_t tag = at_;
            while (tag = source_.find('{', tag), tag != std::string::npos && !opens(tag)) ++tag;
            std::string text = source_.substr(at_, tag - at_);
            if (tag == std::string::npos) {
                put(Word::Kind::text, std::move(text));
                break;
            }
            const char kind = source_[tag + 1], sign = tag + 2 < source_.size() ? source_[tag + 2] : '\0';
            if (sign == '-')
                text.erase(text.find_last_not_of(spaces) + 1);
            else if (kind != '{' && sign != '+')
                strip_line(text, tag);
            if (!text.empty()) put(Word::Kind::text, text);
            line_ += std::count(source_.begin() + static_cast<std::ptrdiff_t>(at_),
                                source_.begin() + static_cast<std::ptrdiff_t>(tag), '\n');
            at_ = tag + 2 + (sign == '-' || sign == '+' ? 1 : 0);
            if (kind == '#')
                skip_comment();
            else
                read_tag(kind);
        }
        return std::move(words_);
    }

private:
    bool opens(std::size_t at) const {
        return at + 1 < source_.size() && (source_[at + 1] == '{' || source_[at + 1] == '%' || source_[at + 1] == '#');
    }
    void put(Word::Kind kind, std::string text) { words_.push_back({kind, std::move(text), line_}); }
    [[noreturn]] void fault(const std::string& what) const { refuse("{}: line {}: {}", place_, line_, what); }

    // lstrip_blocks: blanks between the start of a line and a tag go.
    void strip_line(std::string& text, std::size_t tag) const {
        const std::size_t keep = text.find_last_not_of(" \t") + 1;
        const std::size_t begin = tag - (text.size() - keep);
        if (begin == 0 || source_[begin - 1] == '\n') text.erase(keep);
    }
    // Behind a tag that closes with `sign` before its two last characters; trim: a tag whose newline goes.
    void end_tag(char sign, bool trim) {
        const std::size_t from = at_;
        if (sign == '-')
            at_ = std::min(source_.find_first_not_of(spaces, at_), source_.size());
        else if (trim && sign != '+' && at_ < source_.size() && source_[at_] == '\n')
            ++at_;
        line_ += std::count(source_.begin() + static_cast<std::ptrdiff_t>(from),
                            source_.begin() + static_cast<std::ptrdiff_t>(at_), '\n');
    }
    void skip_comment() {
        const std::size_t end = source_.find("#}", at_);
        if (end == std::string::npos) fault("a comment without end");
        line_ += std::count(source_.begin() + static_cast<std::ptrdiff_t>(at_),
                            source_.begin() + static_cast<std::ptrdiff_t>(end), '\n');
        const char sign = end > at_ ? source_[end - 1] : '\0';
        at_ = end + 2;
        end_tag(sign, true);
    }
    void read_tag(char kind) {
        put(kind == '{' ? Word::Kind::open_print : Word::Kind::open_block, "");
        const std::string_view close = kind == '{' ? "}}" : "%}";
        const std::size_t begin = words_.size();
        int depth = 0; // of brackets: braces of a mapping may stand before those of the tag
        for (;;) {
            while (at_ < source_.size() && spaces.find(source_[at_]) != std::string_view::npos)
                line_ += source_[at_++] == '\n' ? 1 : 0;
            if (at_ == source_.size()) fault("a tag without end");
            const std::string_view rest = std::string_view(source_).substr(at_);
            const bool signs =
                rest.size() > 2 && (rest[0] == '-' || rest[0] == '+') && rest.substr(1).starts_with(close);
            if (depth == 0 && (signs || rest.starts_with(close))) {
                put(Word::Kind::close, "");
                at_ += signs ? 3 : 2;
                return end_tag(signs ? rest[0] : '\0', kind == '%');
            }
            if (words_.size() - begin > most_words) fault(fmt::format("more than {} words in a tag", most_words));
            read_word(rest, depth);
        }
    }
    void read_word(std::string_view rest, int& depth) {
        const char c = rest[0];
        if (c == '\'' || c == '"') return read_string(c);
        std::size_t end = 1;
        if (letter(c) || is_digit(c)) {
            while (end < rest.size() && (letter(rest[end]) || is_digit(rest[end]))) ++end;
            const bool real = is_digit(c) && end + 1 < rest.size() && rest[end] == '.' && is_digit(rest[end + 1]);
            if (real)
                for (++end; end < rest.size() && is_digit(rest[end]);) ++end;
            put(letter(c) ? Word::Kind::name
                : real    ? Word::Kind::real
                          : Word::Kind::integer,
                std::string(rest.substr(0, end)));
        } else {
            for (const char* two : {"==", "!=", "<=", ">=", "//", "**"})
                if (rest.starts_with(two)) end = 2;
            if (std::string_view("+-*/%~<>=!.,:|()[]{}").find(c) == std::string_view::npos)
                fault(fmt::format("'{}' is not known in a tag", c));
            depth += c == '(' || c == '[' || c == '{' ? 1 : c == ')' || c == ']' || c == '}' ? -1 : 0;
            put(Word::Kind::sign, std::string(rest.substr(0, end)));
        }
        at_ += end;
    }
    void read_string(char quote) {
        std::string value;
        for (++at_; at_ < source_.size() && source_[at_] != quote; ++at_) {
            if (source_[at_] != '\\') {
                value += source_[at_];
                continue;
            }
            if (++at_ == source_.size()) break;
            const std::string_view known = "ntr\\'\"", means = "\n\t\r\\'\"";
            const std::size_t which = known.find(source_[at_]);
            if (which == std::string_view::npos) fault(fmt::format("'\\{}' is not known in a string", source_[at_]));
            value += means[which];
        }
        if (at_ == source_.size()) fault("a string without end");
        ++at_;
        put(Word::Kind::string, std::move(value));
    }

    std::string source_;
    const std::string& place_;
    std::size_t at_ = 0, line_ = 1;
    std::vector<Word> words_;
};

} // namespace

std::vector<Word> words_of(const std::string& source, const std::string& place) { return Lexer(source, place).words(); }

} // namespace moe::data::chat
