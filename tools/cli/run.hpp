// One command line from its words to what it prints: what the command moe-plan and the Python package call.
#pragma once

#include "planner/base/error.hpp"

#include <string>
#include <vector>

namespace moe::tools {

// A command line that does not parse; its message is the whole line, "moe-plan VERB: ...; see moe-plan VERB --help".
class UsageError : public Error {
public:
    explicit UsageError(const std::string& line) : Error(Fault::bad_input, line) {}
};

// Runs the verb of a command line. words: without the program's name. Throws UsageError, and Error of the verb.
void run_command(std::vector<std::string> words);

// The same for main(): an error becomes one line on stderr. Returns the exit status.
int run_to_status(std::vector<std::string> words);

} // namespace moe::tools
