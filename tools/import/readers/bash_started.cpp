// What simple commands do: assignments, tests, functions, and the commands that a script starts.
#include "tools/import/readers/bash_walk.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"

#include <algorithm>
#include <filesystem>

namespace moe::tools {
namespace {

bool one_of(const std::string& word, std::initializer_list<const char*> list) {
    return std::any_of(list.begin(), list.end(), [&word](const char* other) { return word == other; });
}

} // namespace

void BashWalk::assign(const Assignment& a, std::size_t at_line) {
    values_.set(a.name, {values_.text(a.value, at_line)}, false, a.append);
}

void BashWalk::assign_array(const Token& array) {
    Assignment a;
    assignment(array.text, a);
    std::vector<std::string> members;
    for (const Token& item : array.items)
        if (item.kind == TokenKind::word)
            for (std::string& word : values_.words(item.text, item.line)) members.push_back(std::move(word));
    values_.set(a.name, std::move(members), true, a.append);
}

Truth BashWalk::simple(bool live) {
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

Truth BashWalk::declare(const SimpleCommand& s, std::size_t first, const std::string& name) {
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

Truth BashWalk::tested(const SimpleCommand& s, std::size_t first) {
    std::vector<std::string> words;
    for (std::size_t i = first + 1; i < s.words.size(); ++i) {
        const Token& t = *s.words[i];
        if (t.text == "]" || t.text == "]]") break;
        words.push_back(t.kind == TokenKind::op ? t.text : values_.text(t.text, t.line));
    }
    return test_words(words);
}

Truth BashWalk::started(BashCommand command, const SimpleCommand& s) {
    if (command.words.empty()) return Truth::yes;
    const std::string name = base_name(command.words[0]);
    const auto behind = [&command](std::size_t first) {
        return std::vector<std::string>(command.words.begin() + static_cast<std::ptrdiff_t>(first),
                                        command.words.end());
    };
    if (const auto function = functions_.find(name); function != functions_.end())
        return call(function->second, behind(1));
    if (one_of(name, {"source", ".", "bash", "sh"}) && command.words.size() > 1) {
        for (const auto& [variable, value] : command.environment) values_.set(variable, {value}, false, false);
        const std::size_t known = run_.commands.size();
        if (follow(behind(1)) && (run_.commands.size() > known || name == "source" || name == ".")) return Truth::yes;
    }
    if (one_of(name, {"source", "."})) {
        if (command.words.size() > 1 && command.words[1].ends_with(".sh"))
            unread(s.line, name + " " + as_written(command.words[1]),
                   "no such file beside the script: give it before this one");
        return Truth::yes;
    }
    if (name == "set" && command.words.size() > 1 && command.words[1] == "--") {
        values_.set_arguments(behind(2));
        return Truth::yes;
    }
    if (name == "shift") {
        BashValues::Arguments words = values_.set_arguments(std::nullopt);
        if (words && !words->empty()) words->erase(words->begin());
        values_.set_arguments(std::move(words));
        return Truth::yes;
    }
    if (name == "exit" || name == "return") {
        // Who leaves with a failure asks for something that whoever starts the script will give it.
        const bool fails = command.words.size() > 1 && command.words[1] != "0";
        left_ = left_ || (name == "exit" && !fails);
        return Truth::yes;
    }
    if (name == "unset") {
        for (std::size_t i = 1; i < command.words.size(); ++i) values_.unset(command.words[i]);
        return Truth::yes;
    }
    if (one_of(name, {":", "set", "shopt", "cd", "mkdir", "echo", "true", "ulimit", "module", "trap"}))
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
    command.file = file_;
    run_.commands.push_back(std::move(command));
    return Truth::yes;
}

bool BashWalk::follow(std::vector<std::string> words) {
    namespace fs = std::filesystem;
    if (!values_.follows() || has_unknown(words[0])) return false;
    constexpr int most_ancestors = 4; // A script is started in its folder or in one above it.
    fs::path folder = fs::path(file_).parent_path(), path = folder / words[0];
    std::error_code none;
    for (int above = 0; !fs::is_regular_file(path, none) && above < most_ancestors; ++above) {
        folder /= "..";
        path = folder / words[0];
    }
    if (!fs::is_regular_file(path, none) || fs::file_size(path, none) > max_file_bytes) return false;
    const std::string file = path.lexically_normal().string(), text = read_file(file);
    if (text.find('\0') != std::string::npos) return false;
    const Deeper deeper(*this);
    if (steps_.depth > most_depth) refuse("{}: scripts nested too deep", file);
    const bool given = words.size() > 1;
    words.erase(words.begin());
    BashValues::Arguments before;
    if (given) before = values_.set_arguments(std::move(words));
    const std::string outer = values_.enter(file);
    const Script script = bash_tokens(text, file);
    BashWalk(script, file, values_, run_, steps_).all();
    values_.enter(outer);
    if (given) values_.set_arguments(std::move(before));
    return true;
}

void BashWalk::inside(const std::string& text, std::size_t at_line) {
    const Deeper deeper(*this);
    if (steps_.depth > most_depth) refuse("{}:{}: scripts nested too deep", file_, at_line);
    const Script script = bash_tokens(text, file_);
    const std::size_t known = run_.commands.size();
    BashWalk(script, file_, values_, run_, steps_).all();
    for (std::size_t i = known; i < run_.commands.size(); ++i) run_.commands[i].line += at_line > 0 ? at_line - 1 : 0;
}

} // namespace moe::tools
