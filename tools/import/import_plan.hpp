// A launch file of another engine as a plan, with what was not understood and what speaks against the plan.
#pragma once

#include "planner/plan/plan.hpp"
#include "planner/stack/stack.hpp"

#include <optional>
#include <string>
#include <vector>

namespace moe::tools {

struct ImportRequest {
    std::vector<std::string> files;
    std::string from, model, hardware, stack; // names; empty: as the files, or the hardware, tell
    std::optional<std::int64_t> gpus, seq;    // none: as the files tell
    bool alone = false;                       // files that scripts read or start are not read
};

enum class Severity : unsigned char { error, warning, hint };
const char* to_string(Severity severity);

struct Finding {
    Severity severity = Severity::warning;
    std::string field, message; // field: name of a plan field, "memory", "model", or a setting's name
};

struct NotUnderstood {
    std::string setting, value; // setting: name of the setting, empty for a part of a script
    std::string file;
    std::size_t line = 0;
    std::string why;
};

struct Import {
    std::string format, release; // "megatron-lm" and the release whose words were taken
    plan::Plan plan;
    stack::Stack stack;
    std::vector<NotUnderstood> unknown;
    std::vector<Finding> findings;          // findings of rules, of settings that disagree; not yet of time and memory
    std::size_t settings = 0, harmless = 0; // numbers of settings in the files, and of those that change nothing
};

// Throws Error (bad_input) naming file and setting for files that cannot be read, for what is missing (model, GPUs) and
// for a plan that is impossible whatever the software.
Import import_plan(const ImportRequest& request);

// Adds whether the plan fits, and the single changes that make it faster by more than one part in a hundred, at most
// three of them.
void add_prices(Import& import);

} // namespace moe::tools
