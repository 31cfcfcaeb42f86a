// Reads the expressions of a chat template into functions of its variables.
#pragma once

#include "engine/data/text/template_lexer.hpp"
#include "planner/base/error.hpp"
#include "planner/base/names.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace moe::data::chat {

using Json = nlohmann::ordered_json;

constexpr int most_rounds = 1 << 20, most_depth = 100;

// Variables by name, those of the innermost loop last; and what the template has written so far.
struct Scope {
    std::vector<std::map<std::string, Json>> frames;
    std::string out;
    int rounds = 0; // of all loops

    Json* find(const std::string& name) {
        for (auto frame = frames.rbegin(); frame != frames.rend(); ++frame)
            if (const auto found = frame->find(name); found != frame->end()) return &found->second;
        return nullptr;
    }
};

using Expression = std::function<Json(Scope&)>;

// A place in the words of a template, and the grammar of expressions from there. Every function throws Error
// (bad_input) that names the template and the line. Grammar: https://jinja.palletsprojects.com/templates/#expressions.
class ExpressionParser {
protected:
    ExpressionParser(const std::string& text, const std::string& place)
        : place_(place), words_(words_of(text, place)) {}

    // A whole expression, the conditional one included.
    Expression expression();
    // One that leaves a following `if` alone, as a loop's list must.
    Expression or_expression();

    // One level of nesting.
    class Level {
    public:
        explicit Level(ExpressionParser& parser) : parser_(parser) {
            if (++parser_.depth_ > most_depth) parser_.fault("nested too deep");
        }
        ~Level() { --parser_.depth_; }
        Level(const Level&) = delete;
        Level& operator=(const Level&) = delete;

    private:
        ExpressionParser& parser_;
    };

    std::string here() const {
        return fmt::format("{}: line {}", place_, words_.empty() ? 1 : words_[std::min(at_, words_.size() - 1)].line);
    }
    [[noreturn]] void fault(const std::string& what) const { refuse("{}: {}", here(), what); }
    bool is(Word::Kind kind, const char* text = nullptr, std::size_t ahead = 0) const {
        return at_ + ahead < words_.size() && words_[at_ + ahead].kind == kind &&
               (text == nullptr || words_[at_ + ahead].text == text);
    }
    bool is_name(const char* text) const { return is(Word::Kind::name, text); }
    bool take(Word::Kind kind, const char* text) {
        if (!is(kind, text)) return false;
        ++at_;
        return true;
    }
    bool sign(const char* text) { return take(Word::Kind::sign, text); }
    bool word(const char* text) { return take(Word::Kind::name, text); }
    void need(bool found, const char* what) const {
        if (!found)
            fault(fmt::format("{} is missing before {}", what,
                              at_ < words_.size() ? shown(words_[at_].text) : std::string("the end")));
    }
    std::string name() {
        need(is(Word::Kind::name), "a name");
        return words_[at_++].text;
    }
    void close() {
        need(is(Word::Kind::close), "the end of the tag");
        ++at_;
    }
    bool over() const { return at_ == words_.size(); }
    const std::string& take_text() { return words_[at_++].text; }

private:
    Expression and_expression();
    Expression not_expression();
    Expression comparison();
    const char* comparing() const;
    static Expression binary(const std::string& op, const Expression& a, const Expression& b, const std::string& at);
    Expression calculation(std::size_t level);
    Expression unary();
    Expression postfix(Expression value);
    Expression subscript(const Expression& value, const std::string& at);
    std::vector<Expression> arguments(const char* end = ")");
    static std::vector<Json> evaluated(const std::vector<Expression>& list, Scope& s);
    Expression primary();
    static Expression constant(Json value);
    Expression mapping(const char* end, const char* between);
    Expression call(const std::string& function, const std::string& at);

    const std::string& place_;
    std::vector<Word> words_;
    std::size_t at_ = 0;
    int depth_ = 0;
};

} // namespace moe::data::chat
