// A walk over the tokens of a script: control flow in bash_run.cpp, simple commands in bash_started.cpp.
#pragma once

#include "planner/base/error.hpp"
#include "tools/import/readers/bash_command.hpp"
#include "tools/import/readers/bash_run.hpp"
#include "tools/import/readers/bash_test.hpp"

#include <initializer_list>
#include <map>
#include <string>
#include <vector>

namespace moe::tools {

// Of all scripts inside of each other, since one that calls itself would not end.
struct BashSteps {
    std::size_t taken = 0;
    int depth = 0;
};

// Walks as bash would, with one question more: whether a condition can be decided from the file alone. Throws Error
// (bad_input) as follow_bash() does.
class BashWalk {
public:
    BashWalk(const Script& script, const std::string& file, BashValues& values, BashRun& run, BashSteps& steps)
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
    static constexpr std::size_t most_steps = 200'000;
    static constexpr int most_depth = 24;

    bool ended() const { return tokens_.ended() || left_; }
    const Token& token() const { return tokens_.token(); }
    bool word_is(const char* text) const { return tokens_.word_is(text); }
    bool op_is(const char* text) const { return tokens_.op_is(text); }
    bool any_word(std::initializer_list<const char*> list) const { return tokens_.any_word(list); }
    std::size_t line() const { return tokens_.line(); }
    void step() {
        if (++steps_.taken > most_steps) refuse("{}: more than {} steps to follow", file_, most_steps);
    }
    void unread(std::size_t line, std::string text, std::string why) {
        if (run_.unread.size() < 1000) run_.unread.push_back({std::move(text), std::move(why), file_, line});
    }
    struct Deeper {
        explicit Deeper(BashWalk& walk) : steps(walk.steps_) {
            if (++steps.depth > most_depth * 4) refuse("{}: nested too deep", walk.file_);
        }
        ~Deeper() { --steps.depth; }
        Deeper(const Deeper&) = delete;
        Deeper& operator=(const Deeper&) = delete;
        BashSteps& steps;
    };

    // Commands up to one of the words, which is left; what the last of them would return.
    Truth list(bool live, std::initializer_list<const char*> ends);
    Truth command(bool live);
    Truth group(bool live, const char* close);
    void expect(const char* word);
    Truth branch(bool live);
    Truth loop(bool live);
    Truth each(bool live);
    Truth choice(bool live);
    Truth definition();
    Truth call(std::size_t body, std::vector<std::string> words);
    void assign(const Assignment& a, std::size_t at_line);
    void assign_array(const Token& array);
    Truth simple(bool live);
    Truth declare(const SimpleCommand& s, std::size_t first, const std::string& name);
    Truth tested(const SimpleCommand& s, std::size_t first);
    Truth started(BashCommand command, const SimpleCommand& s);
    // A script that this one reads or starts, where such a file lies beside it: words[0] is its name, and arguments
    // follow. False where there is none.
    bool follow(std::vector<std::string> words);
    // A script in a word or in a document: it knows the variables as they are here.
    void inside(const std::string& text, std::size_t at_line);

    TokenCursor tokens_;
    const std::string& file_;
    BashValues& values_;
    BashRun& run_;
    BashSteps& steps_;
    bool left_ = false; // whether the script has ended: exit
    std::map<std::string, std::size_t> functions_;
};

} // namespace moe::tools
