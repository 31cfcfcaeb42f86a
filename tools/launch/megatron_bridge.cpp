// Overrides of a recipe of Megatron-Bridge, which its run script takes as words and its configuration as YAML.
#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/stack/rules.hpp"
#include "tools/engines/engine_release.hpp"
#include "tools/engines/engine_value.hpp"
#include "tools/engines/settings.hpp"
#include "tools/launch/engine_launch.hpp"
#include "tools/launch/markup.hpp"

namespace moe::tools {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* plain_gpt = "vanilla_gpt_pretrain_config";

std::string recipe_for(const EngineTable& table, const plan::Plan& plan, const std::string& bridge) {
    for (const EngineRecipe& recipe : table.recipes)
        if (stack::compare_versions(bridge, recipe.from) >= 0 && recipe.when.holds(plan)) return recipe.name;
    return plain_gpt;
}

// What a plain GPT has to be told of the model: the facts among the keyword arguments, and what only a provider has.
void add_model(Json& overrides, const Settings& settings) {
    for (const EngineEntry* entry : entries_for(settings.table, settings.plan, settings.release, "provider")) {
        const auto provider = entry->parts.find("provider"), kwargs = entry->parts.find("kwargs");
        if (provider != entry->parts.end())
            for (const auto& [key, value] : provider->second.items())
                overrides[key] = engine_value(*entry, settings.plan, value);
        if (kwargs == entry->parts.end() || !entry->field.starts_with("model.")) continue;
        for (const auto& [key, value] : kwargs->second.items())
            overrides["model." + key] = engine_value(*entry, settings.plan, value);
    }
    // Megatron-Bridge reads activations by short names.
    const std::string activation = "model.activation_func";
    if (overrides.contains(activation) && overrides[activation].is_string()) {
        const std::string name = overrides[activation].get<std::string>();
        overrides[activation] = name.substr(name.rfind('.') + 1);
    }
}

// An object of the configuration, which is made anew whatever the recipe has in its place.
Json object_of(const std::string& target) { return {{"_target_", "megatron.bridge.training." + target}}; }

Json dtype(const Json& name) { return {{"_target_", name}, {"_call_", false}}; }

// The precision by name where a name says it, else every field of it.
void name_precision(Json& overrides, const EngineTable& table, const std::string& bridge) {
    const Json& known = table.mixed_precision;
    const std::string name = overrides["mixed_precision"].get<std::string>();
    Json named = known["fields"];
    named.update(known["names"][name]);
    Json fields = named;
    const std::string prefix = "mixed_precision.";
    Json kept = Json::object();
    for (const auto& [key, value] : overrides.items()) {
        if (key.starts_with(prefix))
            fields[key.substr(prefix.size())] = value;
        else
            kept[key] = value;
    }
    overrides = kept;
    if (fields == named) return;
    for (const char* key : {"params_dtype", "pipeline_dtype"}) fields[key] = dtype(fields[key]);
    for (const auto& [key, since] : known["since"].items())
        if (stack::compare_versions(bridge, since.get<std::string>()) < 0) fields.erase(key);
    Json whole = object_of("mixed_precision.MixedPrecisionConfig");
    whole.update(fields);
    overrides["mixed_precision"] = whole;
}

void make_comm_overlap(Json& overrides) {
    const std::string prefix = "comm_overlap.";
    Json whole = object_of("comm_overlap.CommOverlapConfig"), kept = Json::object();
    whole["tp_comm_overlap_cfg"] = nullptr;
    for (const auto& [key, value] : overrides.items()) {
        if (key.starts_with(prefix))
            whole[key.substr(prefix.size())] = value;
        else
            kept[key] = value;
    }
    kept["comm_overlap"] = whole;
    overrides = kept;
}

// A value as Hydra's grammar has it.
std::string hydra(const Json& value) {
    std::string text;
    if (value.is_array()) {
        for (const Json& item : value) text += fmt::format("{}{}", text.empty() ? "" : ",", hydra(item));
        return fmt::format("[{}]", text);
    }
    if (value.is_object()) {
        for (const auto& [key, item] : value.items())
            text += fmt::format("{}{}:{}", text.empty() ? "" : ",", key, hydra(item));
        return fmt::format("{{{}}}", text);
    }
    if (!value.is_string()) return value.dump();
    text = value.get<std::string>();
    const char* bare = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./";
    const bool quoted = text.empty() || text.find_first_not_of(bare) != std::string::npos;
    return quoted ? fmt::format("'{}'", text) : text;
}

std::vector<std::string> words(const std::string& recipe, const Json& overrides,
                               const std::map<std::string, std::string>& environment) {
    std::vector<std::string> list{"--recipe", recipe, "--mode", "pretrain", "--dataset", "mock"};
    // ++ sets what the recipe may have as a name, or not at all.
    for (const auto& [key, value] : overrides.items())
        list.push_back(fmt::format("{}{}={}", value.is_object() ? "++" : "", key, hydra(value)));
    Json variables = Json::object();
    for (const auto& [name, value] : environment) variables[name] = value;
    list.push_back(fmt::format("++env_vars={}", hydra(variables)));
    return list;
}

} // namespace

EngineLaunch megatron_bridge_launch(const plan::Plan& plan, const Nodes& nodes) {
    const EngineTable table = load_engine_table("megatron-core");
    const stack::Stack stack = engine_stack(plan, table.name, true);
    const std::string& bridge = stack.engine.bridge;
    const plan::Plan whole = told(plan);
    check_rules(whole, stack);
    const Settings settings{table, whole, stack.engine.release};
    const std::string recipe = recipe_for(table, whole, bridge);
    Json overrides = settings.part("bridge");
    if (recipe == plain_gpt) add_model(overrides, settings);
    name_precision(overrides, table, bridge);
    make_comm_overlap(overrides);
    overrides["train.train_iters"] = 50;
    overrides["logger.log_interval"] = 1;
    EngineLaunch launch;
    launch.engine = "megatron-bridge";
    launch.release = bridge;
    launch.environment = settings.environment("bridge");
    Json config = nested(overrides);
    config["env_vars"] = launch.environment;
    launch.said = {{"recipe", recipe}, {"args", words(recipe, overrides, launch.environment)}, {"config", config}};
    launch.text =
        fmt::format("# {} on {} with {} each: overrides of the recipe {} of Megatron-Bridge {}.\n"
                    "# process_config_with_overrides() reads this file as config_filepath; the run script\n"
                    "# scripts/training/run_recipe.py takes the same as words, the field args of launch "
                    "--megatron-bridge --json.\n",
                    shown(plan.model->name), counted(nodes.count, "node"), counted(nodes.gpus, "GPU"), recipe, bridge) +
        to_yaml(config);
    return launch;
}

} // namespace moe::tools
