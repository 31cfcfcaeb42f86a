// Walks over the tokens as bash would, with one question more: whether a condition can be decided from the file alone.
#include "tools/import/readers/bash_run.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "tools/import/readers/bash_test.hpp"
#include "tools/import/readers/bash_tokens.hpp"

#include <algorithm>
#include <cctype>

namespace moe::tools {
namespace {

constexpr std::size_t max_steps = 200'000;
constexpr int max_depth = 24;

bool name_like(const std::string& text) {
    if (text.empty() || std::isdigit(static_cast<unsigned char>(text[0])) != 0) return false;
    return std::all_of(text.begin(), text.end(),
                       [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; });
}

struct Assignment {
    std::string name, value; // value: raw
    bool append = false;
};

bool assignment(const std::string& raw, Assignment& result) {
    const std::size_t equals = raw.find('=');
    if (equals == std::string::npos || equals == 0) return false;
    result.append = raw[equals - 1] == '+';
    result.name = raw.substr(0, equals - (result.append ? 1 : 0));
    result.value = raw.substr(equals + 1);
    return name_like(result.name);
}

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
        : tokens_(script.tokens), file_(file), values_(values), run_(run), steps_(steps) {
        run_.slurm.insert(run_.slurm.end(), script.slurm.begin(), script.slurm.end());
    }

    void all() {
        while (at_ < tokens_.size()) {
            list(true, {});
            if (at_ < tokens_.size()) ++at_; // a word that closes what was never opened
        }
    }

private:
    bool ended() const { return at_ >= tokens_.size() || left_; }
    const Token& token() const { return tokens_[at_]; }
    bool word_is(const char* text) const {
        return at_ < tokens_.size() && token().kind == TokenKind::word && token().text == text;
    }
    bool op_is(const char* text) const {
        return at_ < tokens_.size() && token().kind == TokenKind::op && token().text == text;
    }
    bool any_word(std::initializer_list<const char*> list) const {
        return std::any_of(list.begin(), list.end(), [this](const char* text) { return word_is(text); });
    }
    std::size_t line() const { return at_ < tokens_.size() ? token().line : 0; }
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
        bool skip = false; // behind && or || that the command before decides
        while (!ended()) {
            step();
            if (token().kind == TokenKind::newline || op_is(";") || op_is("&") || op_is("|")) {
                skip = false;
                ++at_;
                continue;
            }
            if (op_is(";;") || op_is(")") || any_word(ends) ||
                any_word({"fi", "done", "esac", "then", "else", "elif", "do", "}"}))
                break;
            if (op_is("&&") || op_is("||")) {
                const bool both = op_is("&&");
                skip = both ? last != Truth::yes : last != Truth::no;
                ++at_;
                while (!ended() && token().kind == TokenKind::newline) ++at_;
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
        if (word_is("function") || defines()) return definition();
        if (word_is("!")) {
            ++at_;
            if (ended()) return Truth::unknown;
            const Deeper deeper(*this);
            return opposite(command(live));
        }
        return simple(live);
    }

    Truth group(bool live, const char* close) {
        ++at_;
        const Truth last = list(live, {"}"});
        if (op_is(close) || word_is(close)) ++at_;
        return last;
    }

    void expect(const char* word) {
        if (word_is(word)) ++at_;
    }

    Truth branch(bool live) {
        bool taken = false, open = false; // a branch before was taken; one before may have been
        for (;;) {
            const std::size_t begin = line();
            const bool last = word_is("else");
            ++at_;
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
        ++at_;
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
        ++at_;
        const std::string name = at_ < tokens_.size() && token().kind == TokenKind::word ? token().text : "";
        std::vector<std::string> items;
        bool known = name_like(name);
        while (!ended() && !word_is("do")) {
            if (token().kind == TokenKind::word && token().text != name && token().text != "in" && live)
                for (std::string& word : values_.words(token().text, token().line)) items.push_back(std::move(word));
            if (token().kind == TokenKind::op && token().text == "(") known = false;
            ++at_;
        }
        expect("do");
        const std::size_t body = at_;
        if (live && !known) unread(begin, "for", "a loop over numbers: its body is not read");
        if (live && known)
            for (const std::string& item : items) {
                at_ = body;
                values_.set(name, {item}, false, false);
                list(true, {"done"});
                if (left_) return Truth::yes;
            }
        at_ = body;
        list(false, {"done"});
        expect("done");
        return Truth::yes;
    }

    Truth choice(bool live) {
        const std::size_t begin = line();
        ++at_;
        const std::string word = !ended() && token().kind == TokenKind::word ? values_.text(token().text, begin) : "";
        if (!ended()) ++at_;
        expect("in");
        if (live && has_unknown(word))
            unread(begin, "case " + as_written(word), "not known from the file: no branch is read");
        bool done = !live || has_unknown(word);
        while (!ended() && !word_is("esac")) {
            bool hit = false;
            while (!ended() && !op_is(")") && !word_is("esac")) { // patterns
                if (token().kind == TokenKind::word)
                    hit = hit || matches_pattern(word, values_.text(token().text, token().line));
                ++at_;
            }
            if (ended() || word_is("esac")) break;
            ++at_;
            list(!done && hit, {"esac"});
            done = done || hit;
            if (op_is(";;")) ++at_;
            while (!ended() && token().kind == TokenKind::newline) ++at_;
            step();
        }
        expect("esac");
        return Truth::yes;
    }

    // NAME ( ) {
    bool defines() const {
        return at_ + 2 < tokens_.size() && token().kind == TokenKind::word && name_like(token().text) &&
               tokens_[at_ + 1].kind == TokenKind::op && tokens_[at_ + 1].text == "(" &&
               tokens_[at_ + 2].kind == TokenKind::op && tokens_[at_ + 2].text == ")";
    }

    Truth definition() {
        if (word_is("function")) ++at_;
        const std::string name = at_ < tokens_.size() ? token().text : "";
        while (!ended() && !word_is("{") && token().kind != TokenKind::newline) ++at_;
        while (!ended() && token().kind == TokenKind::newline) ++at_;
        if (!word_is("{")) return Truth::yes;
        functions_[name] = at_;
        group(false, "}");
        return Truth::yes;
    }

    Truth call(std::size_t body) {
        const Deeper deeper(*this);
        const std::size_t back = at_;
        at_ = body;
        group(true, "}");
        at_ = back;
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

    // Up to the end of one command: its words as written, arrays that it assigns, documents behind <<.
    struct Simple {
        std::vector<const Token*> words;
        const Token* document = nullptr;
        std::size_t line = 0;
    };

    Simple collect() {
        Simple simple;
        simple.line = line();
        const bool double_brackets = word_is("[[");
        while (!ended()) {
            const Token& t = token();
            if (t.kind == TokenKind::newline) break;
            if (t.kind != TokenKind::op) {
                simple.words.push_back(&t);
                ++at_;
                if (double_brackets && t.text == "]]") break;
                continue;
            }
            if (double_brackets) {
                simple.words.push_back(&t);
            } else if (t.text.find_first_of("<>") != std::string::npos) {
                if (t.text.rfind("<<", 0) == 0 && t.text != "<<<") {
                    simple.document = &t;
                } else if (at_ + 1 < tokens_.size() && tokens_[at_ + 1].kind == TokenKind::word &&
                           t.text.back() != '-') {
                    ++at_; // the file
                }
            } else {
                break;
            }
            ++at_;
        }
        if (at_ < tokens_.size() && op_is("(") && simple.words.empty()) ++at_;
        return simple;
    }

    Truth simple(bool live) {
        const std::size_t start = at_;
        const Simple s = collect();
        if (at_ == start) ++at_;
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

    Truth declare(const Simple& s, std::size_t first, const std::string& name) {
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

    Truth tested(const Simple& s, std::size_t first) {
        std::vector<std::string> words;
        for (std::size_t i = first + 1; i < s.words.size(); ++i) {
            const Token& t = *s.words[i];
            if (t.text == "]" || t.text == "]]") break;
            words.push_back(t.kind == TokenKind::op ? t.text : values_.text(t.text, t.line));
        }
        return test_words(words);
    }

    Truth started(BashCommand command, const Simple& s) {
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

    const std::vector<Token>& tokens_;
    const std::string& file_;
    BashValues& values_;
    BashRun& run_;
    Steps& steps_;
    std::size_t at_ = 0;
    bool left_ = false; // the script has ended: exit
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
