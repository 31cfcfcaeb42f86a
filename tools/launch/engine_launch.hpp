// A plan for another engine: what that engine is given, as a document and as the file that a person runs.
#pragma once

#include "planner/plan/fwd.hpp"

#include <nlohmann/json.hpp>

#include <map>
#include <string>

namespace moe::tools {

// The nodes where the job runs: processes = ranks = GPUs.
struct Nodes {
    std::string name; // name of the job, of letters, digits and hyphens
    int count = 1, gpus = 1;
};

// NOLINTNEXTLINE(bugprone-exception-escape): to move an ordered_json may copy its keys
struct EngineLaunch {
    std::string engine;          // "megatron-lm"
    std::string release;         // release whose words these are, "0.19.0"
    nlohmann::ordered_json said; // "args", "config" or "class" and "kwargs": what the engine is given
    std::map<std::string, std::string> environment;
    std::string text;    // text of the file
    bool script = false; // whether the file is run as it is
};

// All refuse (Error, bad_input) a plan that the engine cannot express, naming the field, and one that breaks a rule of
// its release. The release is that of the plan's stack, the newest known where the stack is of another engine.

// Keyword arguments of Megatron-Core's configuration classes: "class" and "kwargs", with "optimizer" and "ddp" beside
// them. The file is the document itself.
EngineLaunch megatron_core_launch(const plan::Plan& plan);
// A bash script that starts Megatron-LM's pretraining: "args" are its arguments as they are without any variable set.
EngineLaunch megatron_lm_launch(const plan::Plan& plan, const Nodes& nodes);
// Overrides of a recipe of Megatron-Bridge: "recipe", "config" as the YAML file has it, and "args" for its run script.
// A model of which it has no recipe overrides that of a plain GPT.
EngineLaunch megatron_bridge_launch(const plan::Plan& plan, const Nodes& nodes);

// The TOML file of torchtitan's job configuration, and the YAML file of AutoModel's benchmarking recipe: "config". Both
// know the models that their tables name, and refuse others.
EngineLaunch torchtitan_launch(const plan::Plan& plan, const Nodes& nodes);
EngineLaunch automodel_launch(const plan::Plan& plan, const Nodes& nodes);

} // namespace moe::tools
