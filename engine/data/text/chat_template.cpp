// Parses a chat template into steps that write text, and runs them.
#include "engine/data/text/chat_template.hpp"

#include "engine/data/text/template_expressions.hpp"
#include "engine/data/text/template_values.hpp"
#include "planner/base/error.hpp"
#include "planner/base/names.hpp"

#include <algorithm>
#include <utility>

namespace moe::data {

using chat::Expression;
using chat::Scope;

struct ChatTemplate::Block {
    std::vector<std::function<void(Scope&)>> steps;
    void run(Scope& scope) const {
        for (const auto& step : steps) step(scope);
    }
};

namespace {

using chat::Word;
using Block = ChatTemplate::Block;

constexpr std::size_t most_bytes = std::size_t{64} << 20;

class Parser : private chat::ExpressionParser {
public:
    Parser(const std::string& text, const std::string& place) : ExpressionParser(text, place) {}

    Block whole() {
        Block block = body({});
        if (!over()) fault("an end without its beginning");
        return block;
    }

private:
    // Up to a block tag of one of these names, of which the name is taken; up to the end where there are none.
    Block body(const std::vector<std::string>& ends) {
        const Level level(*this);
        Block block;
        while (!over()) {
            if (is(Word::Kind::text)) {
                block.steps.emplace_back([text = take_text(), at = here()](Scope& scope) { put(scope, text, at); });
            } else if (is(Word::Kind::open_print)) {
                take_text();
                const std::string at = here();
                block.steps.emplace_back(
                    [e = expression(), at](Scope& scope) { put(scope, chat::text_of(e(scope), at), at); });
                close();
            } else {
                take_text();
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
            std::vector<chat::Json> kept;
            const auto enter = [&](const chat::Json& item) {
                if (++scope.rounds > chat::most_rounds)
                    refuse("{}: more than {} rounds of loops", at, chat::most_rounds);
                auto& frame = scope.frames.emplace_back();
                if (names.size() == 1) {
                    frame[names[0]] = item;
                    return;
                }
                if (!item.is_array() || item.size() != 2) refuse("{}: an item has not the loop's two parts", at);
                for (std::size_t i = 0; i < 2; ++i) frame[names[i]] = item[i];
            };
            for (chat::Json& item : chat::items(list(scope), at)) {
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
                chat::Json loop{{"index", i + 1},        {"index0", i},
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
            chat::Json set = value(scope);
            if (member.empty()) {
                scope.frames.back()[variable] = std::move(set);
                return;
            }
            chat::Json* space = scope.find(variable);
            if (space == nullptr || !space->is_object()) refuse("{}: {} is no namespace", at, shown(variable));
            (*space)[member] = std::move(set);
        });
    }

    std::string ended_by_;
};

} // namespace

ChatTemplate::ChatTemplate(const std::string& text, std::string place)
    : place_(std::move(place)), body_(std::make_unique<Block>(Parser(text, place_).whole())) {}
ChatTemplate::~ChatTemplate() = default;

std::string ChatTemplate::render(const chat::Json& variables) const {
    Scope scope;
    std::map<std::string, chat::Json>& frame = scope.frames.emplace_back();
    for (const auto& [name, value] : variables.items()) frame[name] = value;
    scope.frames.emplace_back();
    body_->run(scope);
    return std::move(scope.out);
}

} // namespace moe::data
