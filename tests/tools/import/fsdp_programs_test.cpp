// The verb import on files of programs that train transformers' models under FSDP: verl and NeMo-RL.
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <string>

using moe::test::document;
using moe::test::Folder;
using Json = nlohmann::ordered_json;

namespace {

const char* actor =
    "set -x\nsp=2\npython3 -m verl.trainer.main_ppo \\\n"
    "  data.train_batch_size=512 data.max_prompt_length=1024 data.max_response_length=$((1024 * 3)) \\\n"
    "  actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B-Instruct-2507 \\\n"
    "  actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.ulysses_sequence_parallel_size=${sp} \\\n"
    "  actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 \\\n"
    "  actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.n=4 \\\n"
    "  actor_rollout_ref.ref.fsdp_config.param_offload=True trainer.nnodes=2 trainer.n_gpus_per_node=8";

const char* policy =
    "policy:\n  model_name: Qwen/Qwen3-30B-A3B\n  train_global_batch_size: 128\n  train_micro_batch_size: 2\n"
    "  max_total_sequence_length: 4096\n  precision: bfloat16\n"
    "  dtensor_cfg: {enabled: true, cpu_offload: false, sequence_parallel: true, activation_checkpointing: true,\n"
    "    tensor_parallel_size: 2, context_parallel_size: 2, expert_parallel_size: 4, new_part: 3}\n"
    "  megatron_cfg: {enabled: false, tensor_model_parallel_size: 8}\n"
    "cluster: {gpus_per_node: 8, num_nodes: 4}\n";

Json imported(const Folder& folder, const std::string& words) {
    return document(folder.run("moe-plan import " + words + " --hardware h100 --json"));
}

bool told(const Json& read, const std::string& words) {
    for (const Json& finding : read["findings"])
        if (finding["message"].get<std::string>().find(words) != std::string::npos) return true;
    return false;
}

} // namespace

TEST_CASE("import: verl's actor under FSDP, whose sequences are cut by Ulysses") {
    const Folder folder;
    folder.write("run.sh", std::string(actor) + " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2\n");
    const Json read = imported(folder, "run.sh");
    const Json& plan = read["plan"];
    CHECK(plan["model"]["name"] == "Qwen3-30B-A3B");
    CHECK(plan["mesh"]["gpus"] == 16);
    CHECK(plan["mesh"]["tp"] == 1); // not that of its generation
    CHECK(plan["mesh"]["cp"] == 2);
    CHECK(plan["mesh"]["dp"] == 8);
    CHECK(plan["mesh"]["ep"] == 1);
    CHECK(plan["cp_comm"] == "alltoall");
    CHECK(plan["mbs"] == 2);
    CHECK(plan["workload"]["gbs"] == 256);
    CHECK(plan["workload"]["seq"] == 4096);
    CHECK(plan["fsdp"] == true);
    CHECK(plan["precision"] == "bf16");
    CHECK(plan["gradients"] == "fp32");
    CHECK(plan["recompute"] == Json::array({"full"})); // the program's default
    CHECK(plan["optimizer"] == "adamw");
    CHECK(read["unknown"].empty());
    CHECK_FALSE(told(read, "in shards over so many ranks"));
    CHECK_FALSE(told(read, "trains all weights"));
}

TEST_CASE("import: verl's own defaults, its older micro-batch, and what no plan has") {
    const Folder folder;
    folder.write("run.sh", std::string(actor) +
                               " actor_rollout_ref.actor.ppo_micro_batch_size=32 "
                               "actor_rollout_ref.model.enable_gradient_checkpointing=False strategy=fsdp2 "
                               "actor_rollout_ref.model.lora_rank=16 actor_rollout_ref.actor.fsdp_config.fsdp_size=8 "
                               "actor_rollout_ref.actor.fsdp_config.new_switch=True\n");
    const Json read = imported(folder, "run.sh");
    CHECK(read["plan"]["mbs"] == 4); // 32 sequences of 8 groups of 2 ranks
    CHECK(read["plan"]["recompute"] == Json::array());
    CHECK(told(read, "trains all weights"));
    CHECK(told(read, "fsdp_size 8: weights are in shards over so many ranks"));
    CHECK(read["unknown"].dump().find("fsdp_config.new_switch") != std::string::npos);

    folder.write("run.sh", "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-8B "
                           "data.max_response_length=1536 actor_rollout_ref.actor.use_dynamic_bsz=True "
                           "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8\n");
    const Json usual = imported(folder, "run.sh");
    CHECK(usual["plan"]["workload"]["seq"] == 2048); // 512 of prompts
    CHECK(usual["plan"]["workload"]["gbs"] == 256);
    CHECK(usual["plan"]["mesh"]["gpus"] == 8);
    CHECK(usual["plan"]["mbs"] == 1); // which is not looked at beside a number of tokens
    CHECK(told(usual, "one sequence of full length"));
}

TEST_CASE("import: Ulysses beyond the key heads is told, since a plan keeps the ring there") {
    const Folder folder;
    folder.write("run.sh", "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B "
                           "actor_rollout_ref.actor.ulysses_sequence_parallel_size=8\n");
    const Json read = imported(folder, "run.sh");
    CHECK(read["plan"]["mesh"]["cp"] == 8);
    CHECK(read["plan"]["cp_comm"] == "ring");
    CHECK(told(read, "cp_comm alltoall, which the program has, is none of a plan here: "));
}

TEST_CASE("import: verl's fine-tuning under FSDP") {
    const Folder folder;
    folder.write("sft.sh", "torchrun --standalone --nnodes=1 --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer "
                           "data.train_batch_size=64 data.micro_batch_size_per_gpu=4 data.max_length=2048 "
                           "model.partial_pretrain=Qwen/Qwen3-8B ulysses_sequence_parallel_size=2 "
                           "use_remove_padding=true\n");
    const Json read = imported(folder, "sft.sh");
    const Json& plan = read["plan"];
    CHECK(plan["model"]["name"] == "Qwen3-8B");
    CHECK(plan["mesh"]["gpus"] == 8);
    CHECK(plan["mesh"]["cp"] == 2); // of a setting without a section
    CHECK(plan["workload"]["gbs"] == 64);
    CHECK(plan["workload"]["seq"] == 2048);
    CHECK(plan["mbs"] == 4);
    CHECK(plan["fsdp"] == true);
    CHECK(plan["precision"] == "bf16"); // of a dense model, where no setting of the engine says it
    CHECK(plan["optimizer"] == "adamw");
    CHECK(read["unknown"].empty());
}

TEST_CASE("import: NeMo-RL's policy under DTensor") {
    const Folder folder;
    folder.write("run.yaml", policy);
    const Json read = imported(folder, "run.yaml");
    const Json& plan = read["plan"];
    CHECK(plan["model"]["name"] == "Qwen3-30B-A3B");
    CHECK(plan["mesh"]["gpus"] == 32);
    CHECK(plan["mesh"]["tp"] == 2); // not Megatron's, which is off
    CHECK(plan["mesh"]["cp"] == 2);
    CHECK(plan["mesh"]["ep"] == 4);
    CHECK(plan["cp_comm"] == "ring");
    CHECK(plan["mbs"] == 2);
    CHECK(plan["workload"]["gbs"] == 128);
    CHECK(plan["workload"]["seq"] == 4096);
    CHECK(plan["recompute"] == Json::array({"full"}));
    CHECK(plan["fsdp"] == true);
    CHECK(plan["precision"] == "bf16");
    CHECK(read["unknown"].size() == 1); // new_part
    CHECK_FALSE(told(read, "whole on every rank"));

    folder.write("whole.yaml", "defaults: run.yaml\npolicy: {dtensor_cfg: {sequence_parallel: false}}\n");
    const Json whole = imported(folder, "whole.yaml");
    CHECK(whole["plan"]["mesh"]["tp"] == 2);
    CHECK(told(whole, "TP leaves the activations between its products whole on every rank"));
}
