// The script for Megatron-LM. It is put together by fmt: its parts are lists of words, and it has no cases.
#include "planner/base/names.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"
#include "tools/engines/engine_release.hpp"
#include "tools/engines/settings.hpp"
#include "tools/launch/engine_launch.hpp"
#include "tools/launch/job.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace moe::tools {
namespace {

// Settings of a run that no plan has, with the variable of the script that changes them.
struct RunSetting {
    const char *flag, *variable, *value;
};
constexpr RunSetting run_settings[] = {{"--train-iters", "STEPS", "50"},
                                       {"--lr", "LR", "1e-4"},
                                       {"--min-lr", "MIN_LR", "1e-5"},
                                       {"--lr-decay-style", "", "cosine"},
                                       {"--lr-warmup-fraction", "", "0.01"},
                                       {"--weight-decay", "", "0.1"},
                                       {"--adam-beta1", "", "0.9"},
                                       {"--adam-beta2", "", "0.95"},
                                       {"--clip-grad", "", "1.0"},
                                       {"--init-method-std", "", "0.02"},
                                       {"--seed", "", "1234"},
                                       {"--eval-iters", "", "0"},
                                       {"--log-interval", "", "1"},
                                       {"--log-throughput", "", ""},
                                       {"--num-workers", "", "2"}};
constexpr const char* without_data[] = {"--mock-data", "--tokenizer-type", "NullTokenizer"};

using Words = std::vector<std::string>;

// The script's three lists, in its order: the model's arguments, the plan's, and those that no field says.
enum class Part : std::uint8_t { model, plan, implied };
Part part_of(const Argument& argument) {
    if (argument.field.empty()) return Part::implied;
    return argument.field.starts_with("model.") ? Part::model : Part::plan;
}

// The arguments of one list, a line for each.
std::string lines_of(const std::vector<Argument>& list, Part part) {
    std::string text;
    for (const Argument& argument : list) {
        if (part_of(argument) != part) continue;
        text += fmt::format("    {}", argument.flag);
        for (const std::string& value : argument.values) text += fmt::format(" {}", quoted(value));
        text += "\n";
    }
    return text;
}

Words all_words(const std::vector<Argument>& list) {
    Words words;
    for (const Argument& argument : list) {
        words.push_back(argument.flag);
        words.insert(words.end(), argument.values.begin(), argument.values.end());
    }
    for (const RunSetting& setting : run_settings) {
        words.emplace_back(setting.flag);
        if (*setting.value != '\0') words.emplace_back(setting.value);
    }
    words.insert(words.end(), std::begin(without_data), std::end(without_data));
    return words;
}

std::string run_lines() {
    std::string text;
    for (const RunSetting& setting : run_settings) {
        text += fmt::format("    {}", setting.flag);
        if (*setting.variable != '\0')
            text += fmt::format(" \"${}\"", setting.variable);
        else if (*setting.value != '\0')
            text += fmt::format(" {}", setting.value);
        text += "\n";
    }
    return text;
}

std::string variable_lines() {
    std::string text;
    for (const RunSetting& setting : run_settings)
        if (*setting.variable != '\0') text += fmt::format("{0}=${{{0}:-{1}}}\n", setting.variable, setting.value);
    return text;
}

std::string exports(const std::map<std::string, std::string>& environment) {
    std::string text;
    for (const auto& [name, value] : environment) text += fmt::format("export {}={}\n", name, quoted(value));
    return text;
}

// Layers by a pattern have a program of their own, of another name before Megatron-Core 0.18.
const char* program_of(const plan::Plan& plan, const std::string& release) {
    if (!plan.model->hybrid) return "pretrain_gpt.py";
    return stack::compare_versions(release, "0.18.0") < 0 ? "pretrain_mamba.py" : "pretrain_hybrid.py";
}

std::string script(const plan::Plan& plan, const Nodes& nodes, const stack::Stack& stack,
                   const std::vector<Argument>& list, const EngineLaunch& launch) {
    return fmt::format(
        R"(#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --exclusive
# Trains {model} on {all} GPUs with Megatron-LM, release core_v{release} with Transformer Engine {engine}.
# Submit it with sbatch, or run it on every node: NODE_RANK=0 MASTER_ADDR=FIRST_NODE bash THIS_FILE.
set -euo pipefail

# What a site sets, in the environment or here. Without DATA the run reads made-up tokens; without CHECKPOINTS it saves
# nothing. DATA: a prefix of .bin and .idx files, or weights and prefixes. TOKENIZER: of Hugging Face, goes with DATA.
MEGATRON_LM=${{MEGATRON_LM:-Megatron-LM}}
DATA=${{DATA:-}}
TOKENIZER=${{TOKENIZER:-}}
CHECKPOINTS=${{CHECKPOINTS:-}}
SAVE_INTERVAL=${{SAVE_INTERVAL:-500}}
{variables}NNODES=${{NNODES:-{nodes}}}
GPUS_PER_NODE=${{GPUS_PER_NODE:-{gpus}}}
MASTER_PORT=${{MASTER_PORT:-29500}}

{exports}
MODEL_ARGS=(
{model_args})
PLAN_ARGS=(
{plan_args})
ENGINE_ARGS=(
{engine_args})
RUN_ARGS=(
{run_args})
DATA_ARGS=({without_data})
if [ -n "$DATA" ]; then
    # shellcheck disable=SC2206 # weights and prefixes are words of their own
    DATA_ARGS=(--data-path $DATA --split '99,1,0' --tokenizer-type HuggingFaceTokenizer
               --tokenizer-model "${{TOKENIZER:?DATA needs TOKENIZER}}")
fi
if [ -n "$CHECKPOINTS" ]; then
    RUN_ARGS+=(--save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval "$SAVE_INTERVAL")
fi
WORDS=("$MEGATRON_LM/{program}" "${{MODEL_ARGS[@]}}" "${{PLAN_ARGS[@]}}" "${{ENGINE_ARGS[@]}}" "${{RUN_ARGS[@]}}"
       "${{DATA_ARGS[@]}}" "$@")

# Slurm: one task per node, which starts that node's processes; node ranks are Slurm's, whose order is the plan's.
if [ -n "${{SLURM_JOB_ID:-}}" ] && [ -z "${{NODE_RANK:-}}" ]; then
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    MASTER_ADDR=${{MASTER_ADDR:-${{hosts%%[[:space:]]*}}}}
    # shellcheck disable=SC2016 # SLURM_NODEID is each task's own
    exec srun --kill-on-bad-exit=1 bash -c 'exec torchrun --node-rank "$SLURM_NODEID" "$@"' torchrun \
        --nnodes "$NNODES" --nproc-per-node "$GPUS_PER_NODE" --master-addr "$MASTER_ADDR" \
        --master-port "$MASTER_PORT" "${{WORDS[@]}}"
fi
if [ "$NNODES" -gt 1 ]; then : "${{MASTER_ADDR:?set MASTER_ADDR to the first node}}"; fi
exec torchrun --node-rank "${{NODE_RANK:-0}}" --nnodes "$NNODES" --nproc-per-node "$GPUS_PER_NODE" \
    --master-addr "${{MASTER_ADDR:-127.0.0.1}}" --master-port "$MASTER_PORT" "${{WORDS[@]}}"
)",
        fmt::arg("name", nodes.name), fmt::arg("nodes", nodes.count), fmt::arg("gpus", nodes.gpus),
        fmt::arg("model", shown(plan.model->name)), fmt::arg("all", plan.gpus), fmt::arg("release", launch.release),
        fmt::arg("engine", stack.engine.transformer_engine), fmt::arg("variables", variable_lines()),
        fmt::arg("exports", exports(launch.environment)), fmt::arg("model_args", lines_of(list, Part::model)),
        fmt::arg("plan_args", lines_of(list, Part::plan)), fmt::arg("engine_args", lines_of(list, Part::implied)),
        fmt::arg("run_args", run_lines()), fmt::arg("without_data", fmt::join(without_data, " ")),
        fmt::arg("program", program_of(plan, launch.release)));
}

} // namespace

EngineLaunch megatron_lm_launch(const plan::Plan& plan, const Nodes& nodes) {
    const EngineTable table = load_engine_table("megatron-core");
    const stack::Stack stack = engine_stack(plan, table.name);
    const plan::Plan whole = told(plan);
    check_rules(whole, stack);
    const Settings settings{table, whole, stack.engine.release};
    std::vector<Argument> list = arguments(settings);
    std::stable_sort(list.begin(), list.end(),
                     [](const Argument& a, const Argument& b) { return part_of(a) < part_of(b); });
    EngineLaunch launch;
    launch.engine = "megatron-lm";
    launch.release = settings.release;
    launch.environment = settings.environment("args");
    launch.said = {{"args", all_words(list)}};
    launch.text = script(whole, nodes, stack, list, launch);
    launch.script = true;
    return launch;
}

} // namespace moe::tools
