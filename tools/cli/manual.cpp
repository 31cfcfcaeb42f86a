// Writes the manual page in roff and the reference of verbs in Markdown.
#include "tools/cli/texts.hpp"
#include "tools/print/table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

namespace moe::tools {

namespace {

// Options that every verb has are told once.
bool of_every_verb(const ArgumentText& argument) {
    return argument.name == "--json" || argument.name == "--verbose" || argument.name == "--quiet" ||
           argument.name == "--help";
}

std::string sentence(std::string text) {
    if (!text.empty()) text.front() = static_cast<char>(std::toupper(static_cast<unsigned char>(text.front())));
    return text + ".";
}

std::string remarks(const ArgumentText& argument) {
    std::vector<std::string> words;
    if (argument.required) words.emplace_back("required");
    if (argument.repeats) words.emplace_back("may be repeated");
    if (!argument.standard.empty()) words.push_back("default " + argument.standard);
    return words.empty() ? "" : fmt::format(" ({})", fmt::join(words, ", "));
}

std::string about(const ArgumentText& argument) {
    // The explanation says already what the remark would.
    std::string text = argument.about;
    const std::string twice = "; may be repeated";
    if (argument.repeats && text.ends_with(twice)) text.erase(text.size() - twice.size());
    return text;
}

// A hyphen of an option is one that can be searched for and copied.
std::string roff(const std::string& text) {
    std::string safe;
    for (const char c : text) {
        if (c == '\\')
            safe += "\\e";
        else if (c == '-')
            safe += "\\-";
        else
            safe += c;
    }
    if (!safe.empty() && (safe.front() == '.' || safe.front() == '\'')) safe.insert(0, "\\&");
    return safe;
}

std::string roff_argument(const ArgumentText& argument) {
    const bool valued = !argument.positional && !argument.value.empty();
    const std::string value = valued ? fmt::format(" \\fI{}\\fR", roff(argument.value)) : std::string();
    const char* font = argument.positional ? "I" : "B";
    return fmt::format(".TP\n\\f{}{}\\fR{}{}\n{}\n", font, roff(argument.name), value, roff(remarks(argument)),
                       roff(about(argument)));
}

std::string synopsis(const VerbText& verb) {
    std::string text = "moe-plan " + verb.name;
    for (const ArgumentText& argument : verb.arguments)
        if (argument.positional)
            text += argument.required ? " " + argument.name : " [" + argument.name + "]";
        else if (argument.required)
            text += fmt::format(" {}", usage_of(argument));
    return text + " [OPTION]..";
}

// Lines of at most 100 characters, the later ones indented by two.
std::string item(const std::string& text) {
    constexpr std::size_t width = 98;
    std::string out;
    for (const std::string& line : wrapped(text, width)) out += (out.empty() ? "* " : "  ") + line + "\n";
    return out;
}

constexpr std::pair<const char*, const char*> environment[] = {
    {"MOE_PLAN_PROFILES", "the folder of profiles, in place of the one beside the command"},
    {"MOE_PLAN_CUDA", "the CUDA engine's module, in place of the one beside the command or installed with it"},
    {"NO_COLOR", "if it is set, nothing is coloured, not even on a terminal"}};

constexpr std::pair<const char*, const char*> statuses[] = {
    {"0", "success"},
    {"1", "a failure while running"},
    {"2", "bad input: one line says what is wrong and what to change"},
    {"3", "the request is sound, and no plan satisfies it"}};

} // namespace

std::string manual_page(const CommandText& command) {
    std::string text = fmt::format(".TH MOE\\-PLAN 1 \"\" \"{}\" \"User Commands\"\n", roff(command.version));
    text += ".SH NAME\nmoe\\-plan \\- plans, simulates and executes Mixture\\-of\\-Experts training\n";
    text += ".SH SYNOPSIS\n.B moe\\-plan\n.I VERB\n[\\fIARGUMENT\\fR].. [\\fIOPTION\\fR]..\n";
    text += fmt::format(".SH DESCRIPTION\n{}\n.SH OPTIONS OF EVERY VERB\n", roff(command.about));
    for (const ArgumentText& argument : command.verbs.front().arguments)
        if (of_every_verb(argument)) text += roff_argument(argument);
    text += ".SH VERBS\n";
    for (const VerbText& verb : command.verbs) {
        text +=
            fmt::format(".SS {}\n{}\n.PP\n.B {}\n", roff(verb.name), roff(sentence(verb.about)), roff(synopsis(verb)));
        for (const ArgumentText& argument : verb.arguments)
            if (!of_every_verb(argument)) text += roff_argument(argument);
        text += fmt::format(".PP\nExample:\n.PP\n.RS 4\n{}\n.RE\n", roff(verb.example));
    }
    text += ".SH EXIT STATUS\n";
    for (const auto& [status, meaning] : statuses) text += fmt::format(".TP\n.B {}\n{}\n", status, roff(meaning));
    text += ".SH ENVIRONMENT\n";
    for (const auto& [name, meaning] : environment) text += fmt::format(".TP\n.B {}\n{}\n", name, roff(meaning));
    return text;
}

std::string reference_of_verbs(const CommandText& command) {
    std::string text =
        "# Every verb and its options\n\n"
        "Written by `moe-plan man --markdown` from what `--help` prints; a test holds this file to it.\n\n"
        "| exit status | meaning |\n|---|---|\n";
    for (const auto& [status, meaning] : statuses) text += fmt::format("| {} | {} |\n", status, meaning);
    text += "\nEvery verb has these options:\n\n";
    const auto listed = [](const ArgumentText& argument) {
        return item(fmt::format("`{}`{}: {}", usage_of(argument), remarks(argument), about(argument)));
    };
    for (const ArgumentText& argument : command.verbs.front().arguments)
        if (of_every_verb(argument)) text += listed(argument);
    text += "\nThe environment:\n\n";
    for (const auto& [name, meaning] : environment) text += item(fmt::format("`{}`: {}", name, meaning));
    for (const VerbText& verb : command.verbs) {
        text += fmt::format("\n## {}\n\n{}\n\n    {}\n", verb.name, sentence(verb.about), verb.example);
        const auto own = [](const ArgumentText& argument) { return !of_every_verb(argument); };
        if (std::any_of(verb.arguments.begin(), verb.arguments.end(), own)) text += "\n";
        for (const ArgumentText& argument : verb.arguments)
            if (own(argument)) text += listed(argument);
    }
    return text;
}

} // namespace moe::tools
