// The grammar of a chat template's expressions: from conditional ones down to names and calls.
#include "engine/data/text/template_expressions.hpp"

#include "engine/data/text/template_values.hpp"

#include <charconv>
#include <utility>

namespace moe::data::chat {

Expression ExpressionParser::expression() {
    const Level level(*this);
    Expression value = or_expression();
    while (word("if")) {
        Expression when = or_expression();
        Expression otherwise = word("else") ? expression() : [](Scope&) { return undefined(); };
        value = [value, when, otherwise](Scope& s) { return chat::truth(when(s)) ? value(s) : otherwise(s); };
    }
    return value;
}

Expression ExpressionParser::or_expression() {
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

Expression ExpressionParser::and_expression() {
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

Expression ExpressionParser::not_expression() {
    const Level level(*this);
    if (!word("not")) return comparison();
    return [a = not_expression()](Scope& s) { return Json(!chat::truth(a(s))); };
}

Expression ExpressionParser::comparison() {
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

const char* ExpressionParser::comparing() const {
    for (const char* known : {"==", "!=", "<=", ">=", "<", ">"})
        if (is(Word::Kind::sign, known)) return known;
    return nullptr;
}

Expression ExpressionParser::binary(const std::string& op, const Expression& a, const Expression& b,
                                    const std::string& at) {
    return [op, a, b, at](Scope& s) {
        const Json left = a(s);
        return chat::binary(op, left, b(s), at);
    };
}

// Levels bind ever closer: sums, joined texts, products.
Expression ExpressionParser::calculation(std::size_t level) {
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

Expression ExpressionParser::unary() {
    const Level level(*this);
    const std::string at = here();
    if (!sign("-")) return postfix(primary());
    return binary(
        "-", [](Scope&) { return Json(0); }, unary(), at);
}

Expression ExpressionParser::postfix(Expression value) {
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

Expression ExpressionParser::subscript(const Expression& value, const std::string& at) {
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
std::vector<Expression> ExpressionParser::arguments(const char* end) {
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

std::vector<Json> ExpressionParser::evaluated(const std::vector<Expression>& list, Scope& s) {
    std::vector<Json> values;
    for (const Expression& e : list) values.push_back(e(s));
    return values;
}

Expression ExpressionParser::primary() {
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

Expression ExpressionParser::constant(Json value) {
    return [value = std::move(value)](Scope&) { return value; };
}

// Keys and values; keys of calls are names.
Expression ExpressionParser::mapping(const char* end, const char* between) {
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

Expression ExpressionParser::call(const std::string& function, const std::string& at) {
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

} // namespace moe::data::chat
