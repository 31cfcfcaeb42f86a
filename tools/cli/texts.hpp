// The verbs that print texts about the command itself: completion scripts, the manual page, the reference of verbs.
#pragma once

#include "tools/cli/description.hpp"
#include "tools/print/output.hpp"

#include <string>

namespace moe::tools {

struct TextOptions : OutputOptions {
    std::string kind; // name of the shell: bash, zsh or fish
};
struct ManOptions : OutputOptions {
    bool markdown = false; // whether the reference of verbs is made in place of the manual page
};

void print_completion(const TextOptions& options, const CommandText& command);
void print_manual(const ManOptions& options, const CommandText& command);

// Scripts that complete verbs, options and values.
std::string bash_completion(const CommandText& command);
std::string zsh_completion(const CommandText& command);
std::string fish_completion(const CommandText& command);

std::string manual_page(const CommandText& command);        // manual page in roff, section 1
std::string reference_of_verbs(const CommandText& command); // Markdown

} // namespace moe::tools
