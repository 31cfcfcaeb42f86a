// Walks over the tokens as bash would, with one question more: whether a condition can be decided from the file alone.
#include "tools/import/readers/bash_run.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "tools/import/readers/bash_command.hpp"
#include "tools/import/readers/bash_test.hpp"

#include <algorithm>
#include <cctype>

namespace moe::tools {
namespace {

constexpr std::size_t max_steps = 200'000;
constexpr int max_depth = 24;

bool one_of(const std::string& word, std::initializer_list<const char*> list) {
    return std::any_of(list.begin(), list.end(), [&word](const char* other) { return word == other; });
}

std::string base_name(const std::string& word) { return word.substr(word.rfind('/') + 1); }

// Of all scripts inside of each other, since one that calls itself would not end.
struct Steps {
    std::size_t taken = 0;
    int depth = 0;
};

class Walk {
public:
    Walk(const Script& script, const std::string& file, BashValues& values, BashRun& run, Steps& steps)
        : tokens_{script.tokens}, file_(file), values_(values), run_(run), steps_(steps) {
        run_.slurm.insert(run_.slurm.end(), script.slurm.begin(), script.slurm.end());
    }

    void all() {
        while (!tokens_.ended()) {
            list(true, {});
            if (!tokens_.ended()) ++tokens_.at; // The word closes what was never opened.
        }
    }

private:
    bool ended() const { return tokens_.ended() || left_; }
    const Token& token() const { return tokens_.token(); }
    bool word_is(const char* text) const { return tokens_.word_is(text); }
    bool op_is(const char* text) const { return tokens_.op_is(text); }
    bool any_word(std::initializer_list<const char*> list) const { return tokens_.any_word(list); }
    std::size_t line() const { return tokens_.line(); }
    void step() {
        if (++steps_.taken > max_steps) refuse("{}: more than {} steps to follow", file_, max_steps);
    }
    void unread(std::size_t line, std::string text, std::string why) {
        if (run_.unread.size() < 1000) run_.unread.push_back({std::move(text), std::move(why), file_, line});
    }
    struct Deeper {
        explicit Deeper(Walk& walk) : steps(walk.steps_) {
            if (++steps.depth > max_depth * 4) refuse("{}: nested too deep", walk.file_);
        }
        ~Deeper() { --steps.depth; }
        Deeper(const Deeper&) = delete;
        Deeper& operator=(const Deeper&) = delete;
        Steps& steps;
    };

    // Commands up to one of the words, which is left; what the last of them would return.
    Truth list(bool live, std::initializer_list<const char*> ends) {
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

    Truth command(bool live) {
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

    Truth group(bool live, const char* close) {
        ++tokens_.at;
        const Truth last = list(live, {"}"});
        if (op_is(close) || word_is(close)) ++tokens_.at;
        return last;
    }

    void expect(const char* word) {
        if (word_is(word)) ++tokens_.at;
    }

    Truth branch(bool live) {
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

    Truth loop(bool live) {
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

    Truth each(bool live) {
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

    Truth choice(bool live) {
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

    Truth definition() {
        if (word_is("function")) ++tokens_.at;
        const std::string name = !tokens_.ended() ? token().text : "";
        while (!ended() && !word_is("{") && token().kind != TokenKind::newline) ++tokens_.at;
        while (!ended() && token().kind == TokenKind::newline) ++tokens_.at;
        if (!word_is("{")) return Truth::yes;
        functions_[name] = tokens_.at;
        group(false, "}");
        return Truth::yes;
    }

    Truth call(std::size_t body) {
        const Deeper deeper(*this);
        const std::size_t back = tokens_.at;
        tokens_.at = body;
        group(true, "}");
        tokens_.at = back;
        return Truth::yes;
    }

    void assign(const Assignment& a, std::size_t at_line) {
        values_.set(a.name, {values_.text(a.value, at_line)}, false, a.append);
    }

    void assign_array(const Token& array) {
        Assignment a;
        assignment(array.text, a);
        std::vector<std::string> members;
        for (const Token& item : array.items)
            if (item.kind == TokenKind::word)
                for (std::string& word : values_.words(item.text, item.line)) members.push_back(std::move(word));
        values_.set(a.name, std::move(members), true, a.append);
    }

    Truth simple(bool live) {
        const std::size_t start = tokens_.at;
        const SimpleCommand s = ended() ? SimpleCommand{} : simple_command(tokens_);
        if (tokens_.at == start) ++tokens_.at;
        if (!live || s.words.empty()) return Truth::unknown;
        BashCommand command;
        command.line = s.line;
        std::size_t first = 0;
        std::vector<Assignment> before;
        for (; first < s.words.size(); ++first) {
            const Token& t = *s.words[first];
            Assignment a;
            if (t.kind == TokenKind::array)
                assign_array(t);
            else if (t.kind == TokenKind::word && assignment(t.text, a))
                before.push_back(a);
            else
                break;
        }
        if (first == s.words.size()) {
            for (const Assignment& a : before) assign(a, s.line);
            return Truth::yes;
        }
        for (const Assignment& a : before) command.environment[a.name] = values_.text(a.value, s.line);
        const std::string name = values_.text(s.words[first]->text, s.line);
        if (one_of(name, {"export", "declare", "local", "readonly", "typeset"})) return declare(s, first + 1, name);
        if (one_of(name, {"[", "[[", "test"})) return tested(s, first);
        for (std::size_t i = first; i < s.words.size(); ++i)
            for (std::string& word : values_.words(s.words[i]->text, s.words[i]->line))
                command.words.push_back(std::move(word));
        return started(std::move(command), s);
    }

    Truth declare(const SimpleCommand& s, std::size_t first, const std::string& name) {
        for (std::size_t i = first; i < s.words.size(); ++i) {
            const Token& t = *s.words[i];
            Assignment a;
            std::string variable = t.text;
            if (t.kind == TokenKind::array) {
                assign_array(t);
                continue;
            }
            if (assignment(t.text, a)) {
                assign(a, s.line);
                variable = a.name;
            }
            if (name == "export" && name_like(variable)) values_.export_name(variable);
        }
        return Truth::yes;
    }

    Truth tested(const SimpleCommand& s, std::size_t first) {
        std::vector<std::string> words;
        for (std::size_t i = first + 1; i < s.words.size(); ++i) {
            const Token& t = *s.words[i];
            if (t.text == "]" || t.text == "]]") break;
            words.push_back(t.kind == TokenKind::op ? t.text : values_.text(t.text, t.line));
        }
        return test_words(words);
    }

    Truth started(BashCommand command, const SimpleCommand& s) {
        if (command.words.empty()) return Truth::yes;
        const std::string name = base_name(command.words[0]);
        if (const auto function = functions_.find(name); function != functions_.end()) return call(function->second);
        if (name == "exit" || name == "return") {
            left_ = left_ || name == "exit";
            return Truth::yes;
        }
        if (name == "unset") {
            for (std::size_t i = 1; i < command.words.size(); ++i) values_.unset(command.words[i]);
            return Truth::yes;
        }
        if (one_of(name, {":", "set", "shift", "shopt", "cd", "mkdir", "echo", "true", "ulimit", "source", ".",
                          "module", "trap"}))
            return Truth::yes;
        if (name == "false") return Truth::no;
        if (name == "read") return Truth::unknown;
        if (name == "exec") command.words.erase(command.words.begin());
        if (name == "eval") {
            std::string text;
            for (std::size_t i = 1; i < command.words.size(); ++i) text += command.words[i] + " ";
            inside(text, s.line);
            return Truth::yes;
        }
        if (s.document != nullptr && one_of(name, {"sbatch", "bash", "sh", "srun"}))
            inside(s.document->plain ? s.document->document : values_.document(s.document->document, s.line), s.line);
        for (std::size_t i = 0; i + 2 < command.words.size(); ++i)
            if (one_of(base_name(command.words[i]), {"bash", "sh"}) && command.words[i + 1].size() > 1 &&
                command.words[i + 1][0] == '-' && command.words[i + 1].back() == 'c')
                inside(command.words[i + 2], s.line);
        if (run_.commands.size() > 20'000) refuse("{}: more commands than a launch script has", file_);
        run_.commands.push_back(std::move(command));
        return Truth::yes;
    }

    // A script in a word or in a document: it knows the variables as they are here.
    void inside(const std::string& text, std::size_t at_line) {
        const Deeper deeper(*this);
        if (steps_.depth > max_depth) refuse("{}:{}: scripts nested too deep", file_, at_line);
        const Script script = bash_tokens(text, file_);
        const std::size_t known = run_.commands.size();
        Walk(script, file_, values_, run_, steps_).all();
        for (std::size_t i = known; i < run_.commands.size(); ++i)
            run_.commands[i].line += at_line > 0 ? at_line - 1 : 0;
    }

    TokenCursor tokens_;
    const std::string& file_;
    BashValues& values_;
    BashRun& run_;
    Steps& steps_;
    bool left_ = false; // whether the script has ended: exit
    std::map<std::string, std::size_t> functions_;
};

} // namespace

BashRun follow_bash(const std::string& text, const std::string& file, BashValues& values) {
    BashRun run;
    Steps steps;
    const Script script = bash_tokens(text, file);
    Walk(script, file, values, run, steps).all();
    for (const auto& [name, variable] : values.variables())
        if (variable.exported && !variable.values.empty()) run.exported[name] = variable.values.front();
    return run;
}

} // namespace moe::tools
