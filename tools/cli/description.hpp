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
    nothing, // a number or a free text
    words,   // ArgumentText::words
    files,
    folders,
    models, // names in profiles/models; likewise the next two
    hardware,
    stacks,
    named, // show's second word, which the word before it says the kind of
};

struct ArgumentText {
    std::string name;  // "--model", "PLAN"
    std::string value; // the kind of its value, such as MODEL; empty for a flag
    std::string about;
    std::string standard; // the value that stands where none is given, empty = none
    bool positional = false, required = false, repeats = false;
    Offer offer = Offer::nothing;
    std::vector<std::string> words; // the values that there are
};
struct VerbText {
    std::string name, about, example;
    std::vector<ArgumentText> arguments; // positional ones first
};
struct CommandText {
    std::string name, about, version;
    std::string footer; // exit statuses
    std::vector<VerbText> verbs;
};

CommandText describe(const CLI::App& app);

// "--model MODEL", "--json", "PLAN".
std::string usage_of(const ArgumentText& argument);

} // namespace moe::tools
