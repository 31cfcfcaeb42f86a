// An engine's table: how the fields of a plan and the facts of its model are said in the engine's own words.
#pragma once

#include "planner/plan/fwd.hpp"
#include "planner/stack/condition.hpp"

#include <nlohmann/json.hpp>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace moe::tools {

// One saying: of plans for which `when` holds, in releases from `from` up to but not including `until` ("" = no bound).
// NOLINTNEXTLINE(bugprone-exception-escape): to move an ordered_json may copy its keys
struct EngineEntry {
    std::string field; // plan field or fact that it says; empty: a setting that no field says
    std::string from, until;
    stack::Condition when;
    nlohmann::ordered_json tests;                           // tests of `when`, as written
    std::vector<std::string> args;                          // flags of a command line, each before its values
    std::map<std::string, nlohmann::ordered_json> parts;    // settings by name, one object for each part
    std::vector<std::pair<std::string, std::string>> words; // modules of a set in the engine's words, "" = has none
    std::map<std::string, std::string> refusals;            // reasons by part, "" = every part, why it cannot be said
    std::string class_name;                                 // class of the configuration; empty: as earlier entries say

    bool in_force(const std::string& release) const;
};

// A recipe that the engine ships for the models for which `when` holds.
struct EngineRecipe {
    std::string name, from; // from: the release of the recipes that has it
    stack::Condition when;
};

// NOLINTNEXTLINE(bugprone-exception-escape): to move an ordered_json may copy its keys
struct EngineTable {
    std::string name;    // "megatron-core"
    std::string release; // release for which the names were looked up; "" where the stacks of the engine say it
    std::string source;  // source of that release's names
    std::vector<EngineEntry> entries;
    std::vector<EngineRecipe> recipes;      // recipes, of which the first that holds is the model's
    nlohmann::ordered_json mixed_precision; // fields, names and since of what names of precisions stand for
};

// profiles/engines/NAME.json, whose grammar profiles/engines/README.md tells. Throws Error (bad_input) naming the
// entry.
EngineTable load_engine_table(const std::string& name);

// The entries that say this plan in that release, in the table's order: all that apply to `part` ("kwargs", "args", ..)
// or only are in force. Throws Error (bad_input), naming the field, for what the part cannot say.
std::vector<const EngineEntry*> entries_for(const EngineTable& table, const plan::Plan& plan,
                                            const std::string& release, const std::string& part);

} // namespace moe::tools
