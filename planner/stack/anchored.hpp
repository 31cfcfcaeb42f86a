// A stack file of the user's own: a published stack with coefficients that have seen measured runs, and these runs.
#pragma once

#include "planner/stack/workload.hpp"

#include <map>
#include <string>
#include <vector>

namespace moe::stack {

struct AnchoredStack {
    std::string base;                           // a published stack, with features behind its name or without
    std::string source;                         // where the figures come from
    std::map<std::string, double> coefficients; // values in place of those in profiles/coefficients.json
    // What runs are off by with these coefficients; published::load_neighbours() takes them beside the published ones.
    std::vector<MeasuredRun> runs;
};

// Whether a word of a stack's name is the path of such a file.
bool names_file(const std::string& word);
// Throws Error (bad_input).
AnchoredStack load_anchored(const std::string& path);
std::string to_json(const AnchoredStack& stack);

} // namespace moe::stack
