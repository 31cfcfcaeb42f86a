// Walks over the tokens as bash would, with one question more: whether a condition can be decided from the file alone.
#include "tools/import/readers/bash_run.hpp"

#include "planner/base/names.hpp"
#include "tools/import/readers/bash_walk.hpp"

namespace moe::tools {

Truth BashWalk::list(bool live, std::initializer_list<const char*> ends) {
    const Deeper deeper(*this);
    Truth last = Truth::yes;
    bool skip = false; // whether the command follows && or || that the one before decides
    while (!ended()) {
        step();
        if (token().kind == TokenKind::newline || op_is(";") || op_is("&") || op_is("|")) {
            skip = false;
            ++tokens_.at;
            continue;
        }
        if (op_is(";;") || op_is(")") || any_word(ends) ||
            any_word({"fi", "done", "esac", "then", "else", "elif", "do", "}"}))
            break;
        if (op_is("&&") || op_is("||")) {
            const bool both = op_is("&&");
            skip = both ? last != Truth::yes : last != Truth::no;
            ++tokens_.at;
            while (!ended() && token().kind == TokenKind::newline) ++tokens_.at;
            continue;
        }
        const Truth outcome = command(live && !skip);
        if (!skip) last = outcome;
    }
    return last;
}

Truth BashWalk::command(bool live) {
    if (op_is("(")) return group(live, ")");
    if (word_is("{")) return group(live, "}");
    if (word_is("if")) return branch(live);
    if (any_word({"while", "until"})) return loop(live);
    if (word_is("for")) return each(live);
    if (word_is("case")) return choice(live);
    if (word_is("function") || tokens_.defines_function()) return definition();
    if (word_is("!")) {
        ++tokens_.at;
        if (ended()) return Truth::unknown;
        const Deeper deeper(*this);
        return opposite(command(live));
    }
    return simple(live);
}

Truth BashWalk::group(bool live, const char* close) {
    ++tokens_.at;
    const Truth last = list(live, {"}"});
    if (op_is(close) || word_is(close)) ++tokens_.at;
    return last;
}

void BashWalk::expect(const char* word) {
    if (word_is(word)) ++tokens_.at;
}

Truth BashWalk::branch(bool live) {
    bool taken = false, open = false; // taken: a branch before was taken; open: one before may have been
    for (;;) {
        const std::size_t begin = line();
        const bool last = word_is("else");
        ++tokens_.at;
        Truth condition = Truth::yes;
        if (!last) {
            condition = list(live && !taken && !open, {"then"});
            expect("then");
        }
        const bool chosen = live && !taken && !open && condition == Truth::yes;
        if (live && !taken && !open && condition == Truth::unknown) {
            open = true;
            unread(begin, "if", "the condition depends on more than the file: neither branch is read");
        }
        list(chosen, {"elif", "else", "fi"});
        taken = taken || chosen;
        if (any_word({"elif", "else"}) && !last && !ended()) continue;
        expect("fi");
        return open ? Truth::unknown : Truth::yes;
    }
}

Truth BashWalk::loop(bool live) {
    const std::size_t begin = line();
    const bool until = word_is("until");
    ++tokens_.at;
    Truth condition = list(live, {"do"});
    if (until) condition = opposite(condition);
    expect("do");
    if (live && condition != Truth::no) unread(begin, until ? "until" : "while", "a loop: its body is not read");
    list(false, {"done"});
    expect("done");
    return Truth::yes;
}

Truth BashWalk::each(bool live) {
    const std::size_t begin = line();
    ++tokens_.at;
    const std::string name = !tokens_.ended() && token().kind == TokenKind::word ? token().text : "";
    std::vector<std::string> items;
    bool known = name_like(name);
    while (!ended() && !word_is("do")) {
        if (token().kind == TokenKind::word && token().text != name && token().text != "in" && live)
            for (std::string& word : values_.words(token().text, token().line)) items.push_back(std::move(word));
        if (token().kind == TokenKind::op && token().text == "(") known = false;
        ++tokens_.at;
    }
    expect("do");
    const std::size_t body = tokens_.at;
    if (live && !known) unread(begin, "for", "a loop over numbers: its body is not read");
    if (live && known)
        for (const std::string& item : items) {
            tokens_.at = body;
            values_.set(name, {item}, false, false);
            list(true, {"done"});
            if (left_) return Truth::yes;
        }
    tokens_.at = body;
    list(false, {"done"});
    expect("done");
    return Truth::yes;
}

Truth BashWalk::choice(bool live) {
    const std::size_t begin = line();
    ++tokens_.at;
    const std::string word = !ended() && token().kind == TokenKind::word ? values_.text(token().text, begin) : "";
    if (!ended()) ++tokens_.at;
    expect("in");
    if (live && has_unknown(word))
        unread(begin, "case " + as_written(word), "not known from the file: no branch is read");
    bool done = !live || has_unknown(word);
    while (!ended() && !word_is("esac")) {
        bool hit = false;
        while (!ended() && !op_is(")") && !word_is("esac")) { // The loop reads patterns.
            if (token().kind == TokenKind::word)
                hit = hit || matches_pattern(word, values_.text(token().text, token().line));
            ++tokens_.at;
        }
        if (ended() || word_is("esac")) break;
        ++tokens_.at;
        list(!done && hit, {"esac"});
        done = done || hit;
        if (op_is(";;")) ++tokens_.at;
        while (!ended() && token().kind == TokenKind::newline) ++tokens_.at;
        step();
    }
    expect("esac");
    return Truth::yes;
}

Truth BashWalk::definition() {
    if (word_is("function")) ++tokens_.at;
    const std::string name = !tokens_.ended() ? token().text : "";
    while (!ended() && !word_is("{") && token().kind != TokenKind::newline) ++tokens_.at;
    while (!ended() && token().kind == TokenKind::newline) ++tokens_.at;
    if (!word_is("{")) return Truth::yes;
    functions_[name] = tokens_.at;
    group(false, "}");
    return Truth::yes;
}

Truth BashWalk::call(std::size_t body, std::vector<std::string> words) {
    const Deeper deeper(*this);
    const std::size_t back = tokens_.at;
    BashValues::Arguments before = values_.set_arguments(std::move(words));
    tokens_.at = body;
    group(true, "}");
    tokens_.at = back;
    values_.set_arguments(std::move(before));
    return Truth::yes;
}

BashRun follow_bash(const std::string& text, const std::string& file, BashValues& values) {
    BashRun run;
    BashSteps steps;
    const Script script = bash_tokens(text, file);
    BashWalk(script, file, values, run, steps).all();
    for (const auto& [name, variable] : values.variables())
        if (variable.exported && !variable.values.empty()) run.exported[name] = variable.values.front();
    return run;
}

} // namespace moe::tools
