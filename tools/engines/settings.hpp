// A plan in an engine's words: settings by part, arguments of a command line, environment.
#pragma once

#include "planner/plan/fwd.hpp"
#include "planner/plan/plan.hpp"
#include "tools/engines/engine_table.hpp"

#include <nlohmann/json.hpp>

#include <map>
#include <string>
#include <vector>

namespace moe::tools {

// The plan as engines have to be told it: stages that the engine would cut otherwise are a layout.
plan::Plan told(const plan::Plan& plan);

// What `table` says of a told() plan in one release. All throw Error (bad_input) for what cannot be said.
struct Settings {
    const EngineTable& table;
    const plan::Plan& plan;
    std::string release;

    // The settings of a part ("kwargs", "optimizer", "ddp", "bridge", "config") by name: of one that two entries name
    // the later value.
    nlohmann::ordered_json part(const std::string& name) const;
    std::string class_name() const; // class of the configuration; "TransformerConfig" where no entry says another
    std::map<std::string, std::string> environment(const std::string& with_part) const;
};

// A flag and its values; a flag that two entries name has the later values, at the place of the first.
struct Argument {
    std::string flag;
    std::vector<std::string> values;
    std::string field; // field that says it first, empty: none
};
std::vector<Argument> arguments(const Settings& settings);

} // namespace moe::tools
