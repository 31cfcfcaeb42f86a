// Parses the words of a command line, runs its verb, and words what does not parse.
#include "tools/cli/run.hpp"

#include "planner/base/names.hpp"
#include "tools/cli/commands.hpp"
#include "tools/print/terminal.hpp"

#include <CLI/CLI.hpp>

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <exception>
#include <new>
#include <regex>
#include <utility>

namespace moe::tools {

namespace {

bool is_number(const std::string& text) {
    double value = 0.0;
    return !text.empty() && CLI::detail::lexical_cast(text, value);
}

// The two words of "--data W PREFIX" become one, since CLI11 could not tell whether an option's optional second word is
// not the next positional argument.
std::vector<std::string> options_joined(const std::vector<std::string>& words) {
    std::vector<std::string> result;
    for (std::size_t i = 0; i < words.size(); ++i) {
        result.push_back(words[i]);
        if (words[i] != "--data" || i + 2 >= words.size() || !is_number(words[i + 1]) || words[i + 2][0] == '-')
            continue;
        result.push_back(words[i + 1] + " " + words[i + 2]);
        i += 2;
    }
    return result;
}

std::vector<std::string> verb_names(const CLI::App& app) {
    std::vector<std::string> names;
    for (const CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; }))
        names.push_back(verb->get_name());
    return names;
}

// "moe-plan", or "moe-plan VERB" once the verb is known.
std::string place(const CLI::App& app) {
    const auto chosen = app.get_subcommands();
    return chosen.empty() ? "moe-plan" : "moe-plan " + chosen.front()->get_name();
}

// Names the words that CLI11 could not place, with the option that was probably meant.
std::string unexpected_text(const CLI::App& verb) {
    const std::vector<std::string> words = verb.remaining();
    const auto option = std::find_if(words.begin(), words.end(), [](const auto& word) { return word[0] == '-'; });
    if (option == words.end()) return "unexpected argument" + (words.empty() ? "" : " '" + words.front() + "'");
    std::vector<std::string> known;
    for (const CLI::Option* candidate : verb.get_options())
        for (const std::string& name : candidate->get_lnames()) known.push_back("--" + name);
    const std::string name = option->substr(0, option->find('='));
    return "unknown option " + name + did_you_mean(name, known);
}

// CLI11's messages of the commonest mistakes, in words that say what to do.
std::string plain_words(const std::string& text) {
    static const std::regex value("Could not convert: (\\S+) = (.*)"),
        repeated("(\\S+): At Most 1 required but received (\\d+)"), missing("(\\S+): 1 required (.*) missing");
    std::smatch part;
    if (std::regex_match(text, part, value))
        return fmt::format("{} {}: must be {}", part.str(1), part.str(2),
                           is_number(part.str(2)) ? "a whole number within 64 bits" : "a plain number, without a unit");
    if (std::regex_match(text, part, repeated))
        return fmt::format("{}: was given {} times and takes one value: leave one out", part.str(1), part.str(2));
    if (std::regex_match(text, part, missing))
        return fmt::format("{}: its value {} is missing", part.str(1), part.str(2));
    return text;
}

// The line for a command line that does not parse.
std::string usage_line(const CLI::App& app, const CLI::ParseError& error) {
    const auto chosen = app.get_subcommands();
    const CLI::App& verb = chosen.empty() ? app : *chosen.front();
    const std::vector<std::string> left = verb.remaining();
    std::string text = plain_words(error.what());
    // A mistyped option first: whatever else is wrong, such as a required one missing, follows from it.
    if (std::any_of(left.begin(), left.end(), [](const auto& word) { return word[0] == '-'; }) ||
        dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr)
        text = unexpected_text(verb);
    else if (chosen.empty() && dynamic_cast<const CLI::RequiredError*>(&error) != nullptr)
        text = "a verb is needed: " + fmt::format("{}", fmt::join(verb_names(app), ", "));
    return place(app) + ": " + text + "; see " + place(app) + " --help";
}

} // namespace

void run_command(std::vector<std::string> words) {
    Commands commands;
    CLI::App& app = commands.app();
    const std::vector<std::string> verbs = verb_names(app);
    if (!words.empty() && words[0].substr(0, 1) != "-" &&
        std::find(verbs.begin(), verbs.end(), words[0]) == verbs.end())
        throw UsageError(
            fmt::format("moe-plan: unknown verb '{}'{}; see moe-plan --help", words[0], did_you_mean(words[0], verbs)));
    words = options_joined(words);
    std::string typed = "moe-plan";
    for (const std::string& word : words) typed += " " + word;
    commands.remember(typed);
    std::reverse(words.begin(), words.end()); // CLI11 takes them from the back
    try {
        app.parse(std::move(words));
    } catch (const CLI::Success& request) { // --help, --version
        app.exit(request);
    } catch (const CLI::ParseError& error) {
        throw UsageError(usage_line(app, error));
    }
}

namespace {

// Names of files and words of the command line are printed as they are, but for what a terminal would obey.
int complain(std::string line, Fault fault) {
    std::replace(line.begin(), line.end(), '\n', ' ');
    std::fputs((inked(printable(line), Ink::error, STDERR_FILENO) + "\n").c_str(), stderr);
    return static_cast<int>(fault);
}

} // namespace

int run_to_status(std::vector<std::string> words) {
    // A closed pipe and a file over the size limit are failed writes like any other.
    std::signal(SIGPIPE, SIG_IGN);
    std::signal(SIGXFSZ, SIG_IGN);
    try {
        run_command(std::move(words));
        return 0;
    } catch (const UsageError& error) {
        return complain(error.what(), error.fault());
    } catch (const Error& error) {
        return complain(fmt::format("moe-plan: {}", error.what()), error.fault());
    } catch (const std::bad_alloc&) {
        return complain("moe-plan: out of memory", Fault::failure);
    } catch (const std::exception& error) {
        return complain(fmt::format("moe-plan: {}", error.what()), Fault::failure);
    }
}

} // namespace moe::tools
