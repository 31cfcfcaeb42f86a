// The command line as plain data, from which completion scripts, the manual page and the reference are written.
#pragma once

#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace moe::tools {

// The kinds of values that a shell can offer for an option.
enum class Offer {
    nothing, // the value is a number or a free text
    words,   // ArgumentText::words
    files,
    folders,
    models, // the value is a name in profiles/models; likewise the next two
    hardware,
    stacks,
    named, // the value is show's second word, whose kind the word before it says
};

struct ArgumentText {
    std::string name;  // "--model", "PLAN"
    std::string value; // kind of the value, such as MODEL; empty for a flag
    std::string about;
    std::string standard; // value that stands where none is given, empty = none
    bool positional = false, required = false, repeats = false;
    Offer offer = Offer::nothing;
    std::vector<std::string> words; // values that there are
};
struct VerbText {
    std::string name, about, example;
    std::vector<ArgumentText> arguments; // arguments, positional ones first
};
struct CommandText {
    std::string name, about, version;
    std::string footer; // text of the exit statuses
    std::vector<VerbText> verbs;
};

CommandText describe(const CLI::App& app);

// "--model MODEL", "--json", "PLAN".
std::string usage_of(const ArgumentText& argument);

} // namespace moe::tools
