// Writes the completion scripts of bash, zsh and fish. Names of profiles are asked of the command itself, when they are
// needed.
#include "tools/cli/texts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

namespace moe::tools {

namespace {

constexpr const char* bash_functions = R"sh(# Completion of moe-plan for bash, written by: moe-plan completion bash

_moe_plan_words() {
    COMPREPLY=($(compgen -W "$1" -- "$word"))
    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2>/dev/null
}
_moe_plan_files() {
    compopt -o filenames 2>/dev/null
    local IFS=$'\n'
    COMPREPLY+=($(compgen -f -- "$word"))
}
_moe_plan_folders() {
    compopt -o filenames 2>/dev/null
    local IFS=$'\n'
    COMPREPLY=($(compgen -d -- "$word"))
}
# Names of profiles; files where no name begins so.
_moe_plan_names() {
    COMPREPLY=($(compgen -W "$(moe-plan show "$1" --quiet 2>/dev/null)" -- "$word"))
    ((${#COMPREPLY[@]})) || _moe_plan_files
}
_moe_plan_named() {
    case $before in
    model) _moe_plan_names models ;;
    hardware) _moe_plan_names hardware ;;
    stack) _moe_plan_names stacks ;;
    plan) _moe_plan_files ;;
    esac
}
_moe_plan() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}
    COMPREPLY=()
)sh";

constexpr const char* zsh_functions = R"sh(#compdef moe-plan
# Completion of moe-plan for zsh, written by: moe-plan completion zsh

# Names of profiles, and files.
_moe_plan_names() {
    local -a names
    names=(${(f)"$(moe-plan show $1 --quiet 2>/dev/null)"})
    compadd -a names
    _files
}
_moe_plan_named() {
    case $words[CURRENT-1] in
    model) _moe_plan_names models ;;
    hardware) _moe_plan_names hardware ;;
    stack) _moe_plan_names stacks ;;
    plan) _files ;;
    esac
}
_moe_plan() {
    local curcontext="$curcontext" state line
    typeset -A opt_args
    local -a verbs
    verbs=(
)sh";

constexpr const char* zsh_dispatch = R"sh(    )
    _arguments -C '--help[print help]' '--version[print the version]' '1:verb:->verb' '*::argument:->arguments'
    case $state in
    verb) _describe verb verbs ;;
    arguments)
        case $words[1] in
)sh";

std::string joined(const std::vector<std::string>& words, const char* between = " ") {
    return fmt::format("{}", fmt::join(words, between));
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
    for (std::size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
        text.replace(at, from.size(), to);
    return text;
}

std::vector<std::string> option_names(const VerbText& verb) {
    std::vector<std::string> names;
    for (const ArgumentText& argument : verb.arguments)
        if (!argument.positional) names.push_back(argument.name);
    return names;
}

std::vector<std::string> verb_names(const CommandText& command) {
    std::vector<std::string> names;
    for (const VerbText& verb : command.verbs) names.push_back(verb.name);
    return names;
}

// The shell's call that offers an argument's values; empty where there is nothing to offer.
std::string bash_call(const ArgumentText& argument) {
    switch (argument.offer) {
    case Offer::nothing:
        return "";
    case Offer::words:
        return fmt::format("_moe_plan_words '{}'", joined(argument.words));
    case Offer::files:
        return "_moe_plan_files";
    case Offer::folders:
        return "_moe_plan_folders";
    case Offer::models:
        return "_moe_plan_names models";
    case Offer::hardware:
        return "_moe_plan_names hardware";
    case Offer::stacks:
        return "_moe_plan_names stacks";
    case Offer::named:
        return "_moe_plan_named";
    }
    return "";
}

std::string bash_verb(const VerbText& verb) {
    std::string text = fmt::format("    {})\n        case $before in\n", verb.name);
    std::vector<std::string> silent;
    for (const ArgumentText& argument : verb.arguments) {
        if (argument.positional || argument.value.empty()) continue;
        const std::string call = bash_call(argument);
        if (call.empty())
            silent.push_back(argument.name);
        else
            text += fmt::format("        {}) {}; return ;;\n", argument.name, call);
    }
    if (!silent.empty()) text += fmt::format("        {}) return ;;\n", joined(silent, " | "));
    text += fmt::format("        esac\n        [[ $word == -* ]] && {{ _moe_plan_words '{}'; return; }}\n",
                        joined(option_names(verb)));
    int place = 2;
    for (const ArgumentText& argument : verb.arguments) {
        if (!argument.positional) continue;
        const bool anywhere = argument.offer == Offer::files;
        const std::string call = bash_call(argument);
        if (call.empty()) continue;
        text += anywhere ? fmt::format("        {}\n", call)
                         : fmt::format("        ((COMP_CWORD == {})) && {}\n", place, call);
        ++place;
    }
    return text + "        ;;\n";
}

// Quoted for a specification of zsh's _arguments, whose explanations end at a bracket.
std::string zsh_quoted(const std::string& text) {
    std::string safe;
    for (const char c : text) {
        if (c == '[' || c == ']' || c == ':' || c == '\\') safe += '\\';
        safe += c;
    }
    return replaced(safe, "'", "'\\''");
}

std::string zsh_action(const ArgumentText& argument) {
    switch (argument.offer) {
    case Offer::nothing:
        return " ";
    case Offer::words:
        return fmt::format("({})", joined(argument.words));
    case Offer::files:
        return "_files";
    case Offer::folders:
        return "_files -/";
    case Offer::models:
        return "_moe_plan_names models";
    case Offer::hardware:
        return "_moe_plan_names hardware";
    case Offer::stacks:
        return "_moe_plan_names stacks";
    case Offer::named:
        return "_moe_plan_named";
    }
    return " ";
}

std::string zsh_argument(const ArgumentText& argument) {
    std::string label;
    for (const char c : argument.value) label += std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : ' ';
    const std::string about = zsh_quoted(argument.about);
    if (argument.positional) return fmt::format("'*:{}:{}'", zsh_quoted(argument.name), zsh_action(argument));
    const std::string option = fmt::format("{}{}[{}]", argument.repeats ? "*" : "", argument.name, about);
    return argument.value.empty() ? fmt::format("'{}'", option)
                                  : fmt::format("'{}:{}:{}'", option, label, zsh_action(argument));
}

std::string zsh_verb(const VerbText& verb) {
    std::string text = fmt::format("        {})\n            _arguments", verb.name);
    int place = 0;
    const bool several = std::count_if(verb.arguments.begin(), verb.arguments.end(),
                                       [](const ArgumentText& a) { return a.positional; }) > 1;
    for (const ArgumentText& argument : verb.arguments) {
        std::string one = zsh_argument(argument);
        if (argument.positional && (several || argument.offer == Offer::words))
            one.replace(1, 1, fmt::format("{}", ++place)); // These words stand nowhere else.
        text += " \\\n                " + one;
    }
    return text + "\n            ;;\n";
}

std::string fish_quoted(const std::string& text) {
    return fmt::format("'{}'", replaced(replaced(text, "\\", "\\\\"), "'", "\\'"));
}

std::string fish_values(const ArgumentText& argument) {
    switch (argument.offer) {
    case Offer::nothing:
        return "-x";
    case Offer::words:
        return fmt::format("-x -a {}", fish_quoted(joined(argument.words)));
    case Offer::files:
        return "-r -F";
    case Offer::folders:
        return "-x -a '(__fish_complete_directories)'";
    case Offer::models:
        return "-r -F -a '(moe-plan show models --quiet)'";
    case Offer::hardware:
        return "-r -F -a '(moe-plan show hardware --quiet)'";
    case Offer::stacks:
        return "-x -a '(moe-plan show stacks --quiet)'";
    case Offer::named:
        return "";
    }
    return "";
}

std::string fish_positional(const std::string& condition, const ArgumentText& argument) {
    if (argument.offer == Offer::words)
        return fmt::format("complete -c moe-plan -n '{}; and not __fish_seen_subcommand_from {}' -a {}\n", condition,
                           joined(argument.words), fish_quoted(joined(argument.words)));
    if (argument.offer == Offer::files) return fmt::format("complete -c moe-plan -n '{}' -F\n", condition);
    if (argument.offer != Offer::named) return "";
    std::string text;
    for (const auto& [word, list] :
         {std::pair{"model", "models"}, std::pair{"hardware", "hardware"}, std::pair{"stack", "stacks"}})
        text += fmt::format("complete -c moe-plan -n '{}; and __fish_seen_subcommand_from {}' -F -a '(moe-plan show {} "
                            "--quiet)'\n",
                            condition, word, list);
    return text + fmt::format("complete -c moe-plan -n '{}; and __fish_seen_subcommand_from plan' -F\n", condition);
}

} // namespace

std::string bash_completion(const CommandText& command) {
    std::string text = bash_functions;
    text +=
        fmt::format("    if ((COMP_CWORD == 1)); then\n        _moe_plan_words '{} --help --version'\n        return\n"
                    "    fi\n    case ${{COMP_WORDS[1]}} in\n",
                    joined(verb_names(command)));
    for (const VerbText& verb : command.verbs) text += bash_verb(verb);
    return text + "    esac\n}\ncomplete -F _moe_plan moe-plan\n";
}

std::string zsh_completion(const CommandText& command) {
    std::string text = zsh_functions;
    for (const VerbText& verb : command.verbs)
        text += fmt::format("        '{}:{}'\n", verb.name, replaced(verb.about, "'", "'\\''"));
    text += zsh_dispatch;
    for (const VerbText& verb : command.verbs) text += zsh_verb(verb);
    return text + "        esac\n        ;;\n    esac\n}\n_moe_plan \"$@\"\n";
}

std::string fish_completion(const CommandText& command) {
    std::string text = "# Completion of moe-plan for fish, written by: moe-plan completion fish\n\n"
                       "complete -c moe-plan -f\n"
                       "complete -c moe-plan -n __fish_use_subcommand -l version -d 'print the version'\n";
    for (const VerbText& verb : command.verbs)
        text += fmt::format("complete -c moe-plan -n __fish_use_subcommand -a {} -d {}\n", verb.name,
                            fish_quoted(verb.about));
    for (const VerbText& verb : command.verbs) {
        const std::string condition = "__fish_seen_subcommand_from " + verb.name;
        text += "\n";
        for (const ArgumentText& argument : verb.arguments) {
            if (argument.positional) {
                text += fish_positional(condition, argument);
                continue;
            }
            const std::string values = argument.value.empty() ? "" : fish_values(argument) + " ";
            text += fmt::format("complete -c moe-plan -n '{}' -l {} {}-d {}\n", condition, argument.name.substr(2),
                                values, fish_quoted(argument.about));
        }
    }
    return text;
}

} // namespace moe::tools
