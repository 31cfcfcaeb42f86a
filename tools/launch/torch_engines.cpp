// Configuration files of torchtitan and of NeMo AutoModel, whose releases are those of their tables.
#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"
#include "tools/engines/settings.hpp"
#include "tools/launch/engine_launch.hpp"
#include "tools/launch/markup.hpp"

namespace moe::tools {
namespace {

using Json = nlohmann::ordered_json;

// The engine's name of the plan's model. Where the engine has a model of that architecture that lacks a part of this
// one, the table names the part.
std::string known_model(const EngineTable& table, const plan::Plan& plan) {
    for (const EngineEntry& entry : table.entries) {
        const auto reason = entry.refusals.find("");
        if (entry.field == "model.parts" && reason != entry.refusals.end() && entry.when.holds(plan))
            refuse("{}", reason->second);
    }
    for (const EngineRecipe& recipe : table.recipes)
        if (recipe.when.holds(plan)) return recipe.name;
    std::vector<std::string> names;
    for (const EngineRecipe& recipe : table.recipes) names.push_back(recipe.name);
    refuse("model {}: {} {} is not known to have it; known are {}", shown(plan.model->name), table.name, table.release,
           fmt::join(names, ", "));
}

struct Written {
    const char *begin, *run; // texts of the comment: what the file is, and the command that reads it
    std::string (*text)(const Json&);
};

EngineLaunch configured(const EngineTable& table, const plan::Plan& plan, const Nodes& nodes, const Json& model,
                        const Written& written) {
    const Settings settings{table, plan, table.release};
    Json flat = settings.part("config");
    flat.update(model);
    EngineLaunch launch;
    launch.engine = table.name;
    launch.release = table.release;
    launch.environment = settings.environment("config");
    const Json config = nested(flat);
    launch.said = {{"config", config}};
    std::string exports;
    for (const auto& [name, value] : launch.environment) exports += fmt::format("{}={} ", name, value);
    launch.text = fmt::format("# {} on {} with {} each, {} {}.\n# {}{}\n", shown(plan.model->name),
                              counted(nodes.count, "node"), counted(nodes.gpus, "GPU"), written.begin, table.release,
                              exports, fmt::format(fmt::runtime(written.run), nodes.count, nodes.gpus)) +
                  written.text(config);
    return launch;
}

} // namespace

EngineLaunch torchtitan_launch(const plan::Plan& plan, const Nodes& nodes) {
    const EngineTable table = load_engine_table("torchtitan");
    const std::string name = known_model(table, plan);
    const std::size_t slash = name.find('/');
    const Json model{{"model.name", name.substr(0, slash)}, {"model.flavor", name.substr(slash + 1)}};
    return configured(table, plan, nodes, model,
                      {"a job of torchtitan",
                       "torchrun --nnodes {} --nproc-per-node {} -m torchtitan.train --job.config_file THIS_FILE",
                       to_toml});
}

EngineLaunch automodel_launch(const plan::Plan& plan, const Nodes& nodes) {
    const EngineTable table = load_engine_table("automodel");
    Json model{{"model.config.pretrained_model_name_or_path", known_model(table, plan)},
               {"benchmark.num_nodes", nodes.count}};
    return configured(table, plan, nodes, model,
                      {"a benchmark of NeMo AutoModel",
                       "torchrun --nnodes {} --nproc-per-node {} -m nemo_automodel.cli.app THIS_FILE", to_yaml});
}

} // namespace moe::tools
