// Follows a bash script without running anything: assignments, branches that can be decided, the commands it would
// start. Scripts beside it that it reads or starts are followed, too.
#pragma once

#include "tools/import/readers/bash_values.hpp"

#include <map>
#include <string>
#include <vector>

namespace moe::tools {

// The name of a program that a script starts, without its folders.
inline std::string base_name(const std::string& word) { return word.substr(word.rfind('/') + 1); }

struct BashCommand {
    std::vector<std::string> words;                 // expanded words, with unknown parts between marks
    std::map<std::string, std::string> environment; // assignments before the command
    std::string file;                               // script that holds it: the one that is read, or one that it reads
    std::size_t line = 0;
};

struct BashRun {
    std::vector<BashCommand> commands; // commands in order, those of `bash -c` and of documents for sbatch among them
    std::map<std::string, std::string> exported;
    std::vector<std::string> slurm;
    std::vector<Unread> unread; // branches and loops that cannot be decided
};

// `values` has variables that are set before, and after it those of the script. Throws Error (bad_input) with the file
// and line of what is no script, or is beyond a bound of size, nesting or steps.
BashRun follow_bash(const std::string& text, const std::string& file, BashValues& values);

} // namespace moe::tools
