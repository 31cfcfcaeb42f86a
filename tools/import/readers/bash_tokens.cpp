// One pass over the characters. Words keep their quotes: what they mean is the expansion's to say.
#include "tools/import/readers/bash_tokens.hpp"

#include "planner/base/error.hpp"
#include "tools/import/readers/setting.hpp"

#include <algorithm>
#include <cctype>
#include <sstream>

namespace moe::tools {
namespace {

constexpr std::size_t max_tokens = 400'000;
constexpr int max_nesting = 60;

bool blank(char c) { return c == ' ' || c == '\t' || c == '\r'; }
bool breaks_word(char c) { return blank(c) || c == '\n' || std::string(";&|()<>").find(c) != std::string::npos; }

// NAME= or NAME+= and nothing behind it.
bool begins_array(const std::string& word) {
    std::size_t at = 0;
    while (at < word.size() && (std::isalnum(static_cast<unsigned char>(word[at])) != 0 || word[at] == '_')) ++at;
    const std::string rest = word.substr(at);
    return at > 0 && (rest == "=" || rest == "+=");
}

class Lexer {
public:
    Lexer(const std::string& text, const std::string& file) : text_(text), file_(file) {}

    Script run() {
        while (more()) {
            if (!next(script_.tokens, false)) break;
        }
        end_line();
        return std::move(script_);
    }

private:
    bool more() const { return at_ < text_.size(); }
    char peek(std::size_t ahead = 0) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0'; }
    [[noreturn]] void stop(std::size_t line, const char* why) const { refuse("{}:{}: {}", file_, line, why); }

    void add(std::vector<Token>& list, Token token) {
        if (++count_ > max_tokens) stop(token.line, "more words than a launch script has");
        list.push_back(std::move(token));
    }

    // Past blanks and continued lines.
    void skip_blanks() {
        while (more()) {
            if (blank(peek())) {
                ++at_;
            } else if (peek() == '\\' && (peek(1) == '\n' || (peek(1) == '\r' && peek(2) == '\n'))) {
                at_ += peek(1) == '\n' ? 2 : 3;
                ++line_;
            } else {
                return;
            }
        }
    }

    void comment() {
        const std::size_t end = std::min(text_.find('\n', at_), text_.size());
        const std::string words = text_.substr(at_, end - at_);
        if (words.rfind("#SBATCH", 0) == 0) {
            std::istringstream stream(words.substr(7));
            for (std::string word; stream >> word && word[0] != '#';) script_.slurm.push_back(word);
        }
        at_ = end;
    }

    // One token into the list; false at the end of the text. `inside`: of an array, which ends at its bracket.
    bool next(std::vector<Token>& list, bool inside) {
        skip_blanks();
        if (!more()) return false;
        if (peek() == '#') {
            comment();
            return true;
        }
        if (peek() == '\n') {
            ++at_;
            if (!inside) add(list, {TokenKind::newline, "\n", line_, {}, {}, false});
            ++line_;
            if (!inside) end_line();
            return true;
        }
        if (breaks_word(peek())) {
            if (inside && peek() == ')') {
                ++at_;
                return false;
            }
            operation(list);
            return true;
        }
        Token token{TokenKind::word, "", line_, {}, {}, false};
        token.text = word();
        if (!inside && peek() == '(' && begins_array(token.text)) array(token);
        add(list, std::move(token));
        return true;
    }

    void array(Token& token) {
        token.kind = TokenKind::array;
        ++at_;
        const std::size_t line = line_;
        for (;;) {
            if (!more()) stop(line, "an array without its closing bracket");
            if (!next(token.items, true)) break;
        }
        if (text_[at_ - 1] != ')') stop(line, "an array without its closing bracket");
    }

    void operation(std::vector<Token>& list) {
        Token token{TokenKind::op, "", line_, {}, {}, false};
        if (peek() == '<' || peek() == '>') {
            while (std::string("<>&|-").find(peek()) != std::string::npos && more()) token.text += text_[at_++];
            if (token.text == "<<" || token.text == "<<-") here_document(token);
        } else {
            token.text = text_[at_++];
            const bool twice = token.text != "(" && token.text != ")" && peek() == token.text[0];
            if (twice) token.text += text_[at_++];
        }
        add(list, std::move(token));
        if (list.back().text.rfind("<<", 0) == 0 && !list.back().document.empty()) waiting_.push_back(list.size() - 1);
    }

    // The word behind << becomes the token's document until the line has ended, when its lines take that place.
    void here_document(Token& token) {
        skip_blanks();
        token.document = word();
        if (token.document.empty()) stop(token.line, "<< without a word");
    }

    void end_line() {
        for (const std::size_t index : waiting_) {
            Token& token = script_.tokens[index];
            std::string end;
            for (const char c : token.document)
                if (c != '\'' && c != '"' && c != '\\') end += c;
            token.plain = end.size() != token.document.size();
            token.document = lines_until(end, token.text == "<<-", token.line);
        }
        waiting_.clear();
    }

    std::string lines_until(const std::string& end, bool tabs, std::size_t line) {
        std::string all;
        while (more()) {
            const std::size_t stop_at = std::min(text_.find('\n', at_), text_.size());
            std::string one = text_.substr(at_, stop_at - at_);
            at_ = std::min(stop_at + 1, text_.size());
            ++line_;
            if (tabs) one.erase(0, std::min(one.find_first_not_of('\t'), one.size()));
            if (!one.empty() && one.back() == '\r') one.pop_back();
            if (one == end) return all;
            all += one + "\n";
        }
        stop(line, "a document behind << without its last line");
    }

    std::string word() {
        std::string raw;
        while (more() && !breaks_word(peek())) piece(raw, 0);
        return raw;
    }

    // One character, or what belongs together: an escape, a quoted text, an expansion.
    void piece(std::string& raw, int depth) {
        if (depth > max_nesting) stop(line_, "quotes and brackets nested too deep");
        const char c = peek();
        if (c == unknown_mark) { // A mark in a script inside of another is a part that nothing is known of.
            take(raw);
            until(raw, unknown_mark, depth, true);
        } else if (c == '\\') {
            if (peek(1) == '\n') {
                at_ += 2;
                ++line_;
                return;
            }
            take(raw);
            if (more()) take(raw);
        } else if (c == '\'') {
            take(raw);
            until(raw, '\'', depth, true);
        } else if (c == '"' || c == '`') {
            take(raw);
            until(raw, c, depth, false);
        } else if (c == '$' && (peek(1) == '{' || peek(1) == '(')) {
            take(raw);
            const char close = peek() == '{' ? '}' : ')';
            take(raw);
            until(raw, close, depth, false);
        } else {
            take(raw);
        }
    }

    void take(std::string& raw) {
        if (peek() == '\n') ++line_;
        raw += text_[at_++];
    }

    void until(std::string& raw, char close, int depth, bool literal) {
        const std::size_t line = line_;
        if (depth > max_nesting) stop(line, "quotes and brackets nested too deep");
        for (;;) {
            if (!more()) stop(line, "a quote or bracket that nothing closes");
            if (peek() == close) {
                take(raw);
                return;
            }
            // In double quotes single ones are themselves; inside of brackets, brackets of the same kind belong
            // together.
            if (literal || (close == '"' && peek() == '\'')) {
                take(raw);
            } else if (close == ')' && peek() == '(') {
                take(raw);
                until(raw, ')', depth + 1, false);
            } else {
                piece(raw, depth + 1);
            }
        }
    }

    const std::string& text_;
    const std::string& file_;
    std::size_t at_ = 0, line_ = 1, count_ = 0;
    std::vector<std::size_t> waiting_; // numbers of the tokens << of this line
    Script script_;
};

} // namespace

Script bash_tokens(const std::string& text, const std::string& file) { return Lexer(text, file).run(); }

} // namespace moe::tools
