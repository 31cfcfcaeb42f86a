// Parses a chat template into functions of its variables, and calls them.
#include "engine/data/text/chat_template.hpp"

#include "engine/data/text/template_lexer.hpp"
#include "engine/data/text/template_values.hpp"
#include "planner/base/error.hpp"
#include "planner/base/names.hpp"

#include <algorithm>
#include <charconv>
#include <functional>
#include <map>
#include <utility>
#include <vector>

namespace moe::data {

using Json = ChatTemplate::Json;

// Variables by name, those of the innermost loop last.
struct ChatTemplate::Scope {
    std::vector<std::map<std::string, Json>> frames;
    std::string out;
    int rounds = 0; // of all loops

    Json* find(const std::string& name) {
        for (auto frame = frames.rbegin(); frame != frames.rend(); ++frame)
            if (const auto found = frame->find(name); found != frame->end()) return &found->second;
        return nullptr;
    }
};

struct ChatTemplate::Block {
    std::vector<std::function<void(Scope&)>> steps;
    void run(Scope& scope) const {
        for (const auto& step : steps) step(scope);
    }
};

namespace {

using chat::undefined;
using chat::Word;
using Scope = ChatTemplate::Scope;
using Block = ChatTemplate::Block;
using Expression = std::function<Json(Scope&)>;

constexpr int most_rounds = 1 << 20, most_depth = 100;
constexpr std::size_t most_bytes = std::size_t{64} << 20;

class Parser {
public:
    Parser(const std::string& text, const std::string& place) : place_(place), words_(chat::words_of(text, place)) {}

    Block whole() {
        Block block = body({});
        if (at_ < words_.size()) fault("an end without its beginning");
        return block;
    }

private:
    // One level of nesting.
    class Level {
    public:
        explicit Level(Parser& parser) : parser_(parser) {
            if (++parser_.depth_ > most_depth) parser_.fault("nested too deep");
        }
        ~Level() { --parser_.depth_; }
        Level(const Level&) = delete;
        Level& operator=(const Level&) = delete;

    private:
        Parser& parser_;
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

    // Up to a block tag of one of these names, of which the name is taken; up to the end where there are none.
    Block body(const std::vector<std::string>& ends) {
        const Level level(*this);
        Block block;
        while (at_ < words_.size()) {
            if (is(Word::Kind::text)) {
                block.steps.emplace_back(
                    [text = words_[at_++].text, at = here()](Scope& scope) { put(scope, text, at); });
            } else if (is(Word::Kind::open_print)) {
                ++at_;
                const std::string at = here();
                block.steps.emplace_back(
                    [e = expression(), at](Scope& scope) { put(scope, chat::text_of(e(scope), at), at); });
                close();
            } else {
                ++at_;
                const std::string tag = name();
                if (std::find(ends.begin(), ends.end(), tag) != ends.end()) {
                    ended_by_ = tag;
                    return block;
                }
                statement(tag, block);
            }
        }
        if (!ends.empty()) fault(fmt::format("{} is missing", ends.back()));
        return block;
    }

    static void put(Scope& scope, const std::string& text, const std::string& at) {
        if (scope.out.size() + text.size() > most_bytes) refuse("{}: writes more than {} bytes", at, most_bytes);
        scope.out += text;
    }

    void statement(const std::string& tag, Block& block) {
        if (tag == "if") return read_if(block);
        if (tag == "for") return read_for(block);
        if (tag == "set") return read_set(block);
        if (tag != "generation") fault(fmt::format("the tag {} is not known", shown(tag)));
        close();
        Block inner = body({"endgeneration"});
        close();
        block.steps.insert(block.steps.end(), inner.steps.begin(), inner.steps.end());
    }

    void read_if(Block& block) {
        std::vector<std::pair<Expression, Block>> branches;
        do {
            Expression condition = expression();
            close();
            Block then = body({"elif", "else", "endif"});
            branches.emplace_back(std::move(condition), std::move(then));
        } while (ended_by_ == "elif");
        close();
        Block otherwise;
        if (ended_by_ == "else") {
            otherwise = body({"endif"});
            close();
        }
        block.steps.emplace_back([branches = std::move(branches), otherwise = std::move(otherwise)](Scope& scope) {
            for (const auto& [when, then] : branches)
                if (chat::truth(when(scope))) return then.run(scope);
            otherwise.run(scope);
        });
    }

    void read_for(Block& block) {
        std::vector<std::string> names{name()};
        if (sign(",")) names.push_back(name());
        need(word("in"), "in");
        const std::string at = here();
        Expression list = or_expression(), filter; // A conditional expression would take the loop's own if.
        if (word("if")) filter = expression();
        close();
        Block inner = body({"endfor"});
        close();
        block.steps.emplace_back([=, inner = std::move(inner)](Scope& scope) {
            std::vector<Json> kept;
            const auto enter = [&](const Json& item) {
                if (++scope.rounds > most_rounds) refuse("{}: more than {} rounds of loops", at, most_rounds);
                auto& frame = scope.frames.emplace_back();
                if (names.size() == 1) {
                    frame[names[0]] = item;
                    return;
                }
                if (!item.is_array() || item.size() != 2) refuse("{}: an item has not the loop's two parts", at);
                for (std::size_t i = 0; i < 2; ++i) frame[names[i]] = item[i];
            };
            for (Json& item : chat::items(list(scope), at)) {
                bool keep = true;
                if (filter) {
                    enter(item);
                    keep = chat::truth(filter(scope));
                    scope.frames.pop_back();
                }
                if (keep) kept.push_back(std::move(item));
            }
            const std::size_t count = kept.size();
            for (std::size_t i = 0; i < count; ++i) {
                enter(kept[i]);
                Json loop{{"index", i + 1},        {"index0", i},
                          {"revindex", count - i}, {"revindex0", count - i - 1},
                          {"first", i == 0},       {"last", i + 1 == count},
                          {"length", count}};
                if (i > 0) loop["previtem"] = kept[i - 1];
                if (i + 1 < count) loop["nextitem"] = kept[i + 1];
                scope.frames.back()["loop"] = std::move(loop);
                inner.run(scope);
                scope.frames.pop_back();
            }
        });
    }

    void read_set(Block& block) {
        const std::string variable = name(), member = sign(".") ? name() : "";
        const std::string at = here();
        need(sign("="), "=");
        Expression value = expression();
        close();
        block.steps.emplace_back([=](Scope& scope) {
            Json set = value(scope);
            if (member.empty()) {
                scope.frames.back()[variable] = std::move(set);
                return;
            }
            Json* space = scope.find(variable);
            if (space == nullptr || !space->is_object()) refuse("{}: {} is no namespace", at, shown(variable));
            (*space)[member] = std::move(set);
        });
    }

    Expression expression() {
        const Level level(*this);
        Expression value = or_expression();
        while (word("if")) {
            Expression when = or_expression();
            Expression otherwise = word("else") ? expression() : [](Scope&) { return undefined(); };
            value = [value, when, otherwise](Scope& s) { return chat::truth(when(s)) ? value(s) : otherwise(s); };
        }
        return value;
    }
    Expression or_expression() {
        Expression a = and_expression();
        while (word("or")) {
            Expression b = and_expression();
            a = [a, b](Scope& s) {
                Json value = a(s);
                return chat::truth(value) ? value : b(s);
            };
        }
        return a;
    }
    Expression and_expression() {
        Expression a = not_expression();
        while (word("and")) {
            Expression b = not_expression();
            a = [a, b](Scope& s) {
                Json value = a(s);
                return chat::truth(value) ? b(s) : value;
            };
        }
        return a;
    }
    Expression not_expression() {
        const Level level(*this);
        if (!word("not")) return comparison();
        return [a = not_expression()](Scope& s) { return Json(!chat::truth(a(s))); };
    }
    Expression comparison() {
        Expression a = calculation(0);
        const std::string at = here();
        const bool negated = is_name("not") && is(Word::Kind::name, "in", 1);
        if (negated) ++at_;
        if (word("in")) {
            a = [a, b = calculation(0), negated, at](Scope& s) {
                const Json item = a(s);
                return Json(chat::contains(b(s), item, at) != negated);
            };
        } else if (const char* op = comparing()) {
            ++at_;
            a = binary(op, a, calculation(0), at);
        }
        if (is_name("in") || comparing() != nullptr) fault("comparisons in a row are not known");
        return a;
    }
    const char* comparing() const {
        for (const char* known : {"==", "!=", "<=", ">=", "<", ">"})
            if (is(Word::Kind::sign, known)) return known;
        return nullptr;
    }
    static Expression binary(const std::string& op, const Expression& a, const Expression& b, const std::string& at) {
        return [op, a, b, at](Scope& s) {
            const Json left = a(s);
            return chat::binary(op, left, b(s), at);
        };
    }
    // Levels bind ever closer: sums, joined texts, products.
    Expression calculation(std::size_t level) {
        static const std::vector<std::vector<const char*>> levels{{"+", "-"}, {"~"}, {"*", "//", "/", "%"}};
        if (level == levels.size()) return unary();
        Expression a = calculation(level + 1);
        for (bool more = true; more;) {
            more = false;
            for (const char* op : levels[level]) {
                const std::string at = here();
                if (!sign(op)) continue;
                a = binary(op, a, calculation(level + 1), at);
                more = true;
            }
        }
        return a;
    }
    Expression unary() {
        const Level level(*this);
        const std::string at = here();
        if (!sign("-")) return postfix(primary());
        return binary(
            "-", [](Scope&) { return Json(0); }, unary(), at);
    }

    Expression postfix(Expression value) {
        for (;;) {
            const std::string at = here();
            if (sign(".")) {
                const std::string member = name();
                if (sign("(")) {
                    value = [value, member, arguments = arguments(), at](Scope& s) {
                        const Json of = value(s);
                        return chat::method(member, of, evaluated(arguments, s), at);
                    };
                    continue;
                }
                value = [value, member, at](Scope& s) { return chat::part(value(s), member, at); };
            } else if (sign("[")) {
                value = subscript(value, at);
            } else if (sign("|")) {
                const std::string filter = name();
                std::vector<Expression> with;
                if (sign("(")) with = arguments();
                value = [value, filter, with, at](Scope& s) {
                    const Json of = value(s);
                    return chat::filter(filter, of, evaluated(with, s), at);
                };
            } else if (word("is")) {
                const bool negated = word("not");
                value = [value, test = name(), negated, at](Scope& s) {
                    return Json(chat::test(test, value(s), at) != negated);
                };
            } else {
                return value;
            }
        }
    }
    Expression subscript(const Expression& value, const std::string& at) {
        const Expression absent = [](Scope&) { return Json(); };
        Expression bounds[3] = {absent, absent, absent};
        std::size_t colons = 0;
        for (; !sign("]");) {
            if (sign(":"))
                need(++colons < 3, "]");
            else
                bounds[colons] = expression();
            need(is(Word::Kind::sign, ":") || is(Word::Kind::sign, "]") || words_[at_ - 1].text == ":", "]");
        }
        if (colons == 0)
            return [value, key = bounds[0], at](Scope& s) {
                const Json of = value(s);
                return chat::part(of, key(s), at);
            };
        return [value, first = bounds[0], last = bounds[1], step = bounds[2], at](Scope& s) {
            return chat::slice(value(s), first(s), last(s), step(s), at);
        };
    }
    // Behind an opening bracket, to the closing one.
    std::vector<Expression> arguments(const char* end = ")") {
        std::vector<Expression> list;
        while (!sign(end)) {
            // Names of arguments that stand at their places anyway.
            if (is(Word::Kind::name) && is(Word::Kind::sign, "=", 1)) {
                const std::string key = name();
                if (key != "indent" && key != "boolean") fault(fmt::format("the argument {} is not known", shown(key)));
                ++at_;
            }
            list.push_back(expression());
            need(is(Word::Kind::sign, end) || sign(","), end);
        }
        return list;
    }
    static std::vector<Json> evaluated(const std::vector<Expression>& list, Scope& s) {
        std::vector<Json> values;
        for (const Expression& e : list) values.push_back(e(s));
        return values;
    }

    Expression primary() {
        if (sign("(")) {
            Expression inner = expression();
            need(sign(")"), ")");
            return inner;
        }
        if (sign("["))
            return [list = arguments("]")](Scope& s) {
                Json value = Json::array();
                for (Json& item : evaluated(list, s)) value.push_back(std::move(item));
                return value;
            };
        if (sign("{")) return mapping("}", ":");
        if (is(Word::Kind::string)) {
            std::string text;
            while (is(Word::Kind::string)) text += words_[at_++].text;
            return constant(text);
        }
        if (is(Word::Kind::integer) || is(Word::Kind::real)) {
            const std::string text = words_[at_].text;
            const bool real = is(Word::Kind::real);
            std::int64_t integer = 0;
            double number = 0.0;
            const char *begin = text.data(), *end = begin + text.size();
            const auto read = real ? std::from_chars(begin, end, number) : std::from_chars(begin, end, integer);
            need(read.ec == std::errc() && read.ptr == end, "a number");
            ++at_;
            return constant(real ? Json(number) : Json(integer));
        }
        const std::string at = here(), variable = name();
        if (variable == "true" || variable == "True") return constant(true);
        if (variable == "false" || variable == "False") return constant(false);
        if (variable == "none" || variable == "None") return constant(nullptr);
        if (sign("(")) return call(variable, at);
        return [variable](Scope& s) {
            const Json* found = s.find(variable);
            return found == nullptr ? undefined() : *found;
        };
    }
    static Expression constant(Json value) {
        return [value = std::move(value)](Scope&) { return value; };
    }
    // Keys and values; keys of calls are names.
    Expression mapping(const char* end, const char* between) {
        std::vector<std::pair<Expression, Expression>> entries;
        while (!sign(end)) {
            Expression key = between[0] == '=' ? constant(name()) : expression();
            need(sign(between), between);
            entries.emplace_back(std::move(key), expression());
            need(is(Word::Kind::sign, end) || sign(","), end);
        }
        return [entries = std::move(entries), at = here()](Scope& s) {
            Json object = Json::object();
            for (const auto& [key, value] : entries) object[chat::text_of(key(s), at)] = value(s);
            return object;
        };
    }
    Expression call(const std::string& function, const std::string& at) {
        if (function == "namespace") return mapping(")", "=");
        std::vector<Expression> with = arguments();
        if (function == "raise_exception" && with.size() == 1)
            return [e = with[0], at](Scope& s) -> Json { refuse("{}: {}", at, shown(chat::text_of(e(s), at))); };
        // A template may ask whether a function is defined: unknown ones are refused where they are called.
        if (function != "range" || with.empty() || with.size() > 2)
            return [function, count = with.size(), at](Scope&) -> Json {
                refuse("{}: the function {} of {} arguments is not known", at, shown(function), count);
            };
        return [with, at](Scope& s) {
            const std::vector<Json> ends = evaluated(with, s);
            for (const Json& end : ends)
                if (!end.is_number_integer()) refuse("{}: range of what is no whole number", at);
            const std::int64_t first = ends.size() > 1 ? ends[0].get<std::int64_t>() : 0;
            const std::int64_t last = ends.back().get<std::int64_t>();
            Json list = Json::array();
            for (std::int64_t i = first; i < last; ++i) {
                if (list.size() > most_rounds) refuse("{}: a range of more than {}", at, most_rounds);
                list.push_back(i);
            }
            return list;
        };
    }

    const std::string& place_;
    std::vector<Word> words_;
    std::size_t at_ = 0;
    int depth_ = 0;
    std::string ended_by_;
};

} // namespace

ChatTemplate::ChatTemplate(const std::string& text, std::string place)
    : place_(std::move(place)), body_(std::make_unique<Block>(Parser(text, place_).whole())) {}
ChatTemplate::~ChatTemplate() = default;

std::string ChatTemplate::render(const Json& variables) const {
    Scope scope;
    std::map<std::string, Json>& frame = scope.frames.emplace_back();
    for (const auto& [name, value] : variables.items()) frame[name] = value;
    scope.frames.emplace_back();
    body_->run(scope);
    return std::move(scope.out);
}

} // namespace moe::data
