// The verb import on files of programs of reinforcement learning and of NeMo, whose sections hold Megatron-LM's
// settings.
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <string>

using moe::test::check_line;
using moe::test::document;
using moe::test::Folder;
using Json = nlohmann::ordered_json;

namespace {

const char* verl =
    "NNODES=${NNODES:-4}\nprompt=$((1024 * 2))\npython3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer "
    "\\\n"
    "  data.max_prompt_length=${prompt} data.max_response_length=6144 actor_rollout_ref.rollout.n=8 \\\n"
    "  actor_rollout_ref.model.path=\"${HOME}/models/Qwen3-30B-A3B\" "
    "actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\\n"
    "  actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \\\n"
    "  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\\n"
    "  actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \\\n"
    "  actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=null \\\n"
    "  +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=selective \\\n"
    "  +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_modules=\"['moe_act','layernorm']\" \\\n"
    "  actor_rollout_ref.ref.megatron.tensor_model_parallel_size=1 trainer.nnodes=${NNODES} "
    "trainer.n_gpus_per_node=8\n";

const char* nemo_rl_base =
    "policy:\n  model_name: Qwen/Qwen3-8B\n  train_global_batch_size: 512\n  train_micro_batch_size: 4\n"
    "  max_total_sequence_length: 512\n  dtensor_cfg: {enabled: true}\n  megatron_cfg:\n    enabled: false\n"
    "    activation_checkpointing: false\n    recompute_granularity: full\n    expert_tensor_parallel_size: 1\n"
    "    tensor_model_parallel_size: 1\n    gradient_accumulation_fusion: false\n    fp8_cfg: {enabled: false, fp8: "
    "e4m3, fp8_recipe: blockwise}\n"
    "    distributed_data_parallel_config: {grad_reduce_in_fp32: false, use_custom_fsdp: false, "
    "data_parallel_sharding_strategy: optim_grads_params}\ncluster: {gpus_per_node: 1, num_nodes: 1}\n";

const char* nemo =
    "trainer: {num_nodes: 4, devices: 8, precision: bf16}\nexp_manager: {name: a}\nmodel:\n  micro_batch_size: 2\n"
    "  global_batch_size: 256\n  tensor_model_parallel_size: 2\n  pipeline_model_parallel_size: 4\n"
    "  virtual_pipeline_model_parallel_size: 2\n  encoder_seq_length: 4096\n  num_layers: 32\n  hidden_size: 2048\n"
    "  ffn_hidden_size: ${multiply:4, ${.hidden_size}}\n  num_attention_heads: 16\n  normalization: rmsnorm\n  bias: "
    "false\n"
    "  activation: fast-swiglu\n  share_embeddings_and_output_weights: false\n  position_embedding_type: rope\n"
    "  activations_checkpoint_granularity: selective\n  fp8: true\n  fp8_hybrid: true\n"
    "  tokenizer: {type: mistralai/Mistral-7B-v0.1}\n  optim: {name: mcore_distributed_optim, grad_sync_dtype: bf16}\n";

Json imported(const Folder& folder, const std::string& words) {
    return document(folder.run("moe-plan import " + words + " --hardware h100 --json"));
}

} // namespace

TEST_CASE("import: verl's command is read as the step of its actor") {
    const Folder folder;
    folder.write("run.sh", verl);
    const Json read = imported(folder, "run.sh");
    const Json& plan = read["plan"];
    CHECK(plan["model"]["name"] == "Qwen3-30B-A3B");
    CHECK(plan["mesh"]["gpus"] == 32);
    CHECK(plan["mesh"]["tp"] == 2); // not that of its generation, nor of its reference
    CHECK(plan["mesh"]["ep"] == 8);
    CHECK(plan["mesh"]["vpp"] == 1);
    CHECK(plan["mbs"] == 2);
    CHECK(plan["workload"]["gbs"] == 256);
    CHECK(plan["workload"]["seq"] == 8192);
    CHECK(plan["precision"] == "bf16"); // nothing in the file says so
    CHECK(plan["recompute"].size() == 2);
    CHECK(read["unknown"].empty());

    folder.write("other.sh", "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.strategy=veomni data.x=1\n");
    check_line(folder.run("moe-plan import other.sh --hardware h100"), 2,
               "other.sh:1: actor_rollout_ref.actor.strategy veomni: verl's actor is read where Megatron or FSDP");
    folder.write("other.sh", "python3 -m verl.trainer.main_ppo model_engine=veomni actor_rollout_ref.rollout.n=8\n");
    check_line(folder.run("moe-plan import other.sh --hardware h100"), 2, "other.sh:1: model_engine veomni");
}

TEST_CASE("import: NeMo-RL's YAML stands over the files under its defaults") {
    const Folder folder;
    folder.write("base.yaml", nemo_rl_base);
    folder.write("run.yaml",
                 "defaults: base.yaml\npolicy:\n  model_name: Qwen/Qwen3-30B-A3B\n  train_micro_batch_size: 1\n"
                 "  max_total_sequence_length: 4096\n  make_sequence_length_divisible_by: "
                 "${policy.megatron_cfg.tensor_model_parallel_size}\n  megatron_cfg:\n    enabled: true\n"
                 "    expert_model_parallel_size: 8\ncluster: {gpus_per_node: 8, num_nodes: 2}\n");
    const Json read = imported(folder, "run.yaml");
    const Json& plan = read["plan"];
    CHECK(plan["model"]["name"] == "Qwen3-30B-A3B");
    CHECK(plan["mesh"]["gpus"] == 16);
    CHECK(plan["mesh"]["ep"] == 8);
    CHECK(plan["mbs"] == 1);
    CHECK(plan["workload"]["gbs"] == 512);
    CHECK(plan["workload"]["seq"] == 4096);
    CHECK(plan["gradients"] == "bf16");
    // What is there and off: FP8, recomputation, sharded weights.
    CHECK(plan["precision"] == "bf16");
    CHECK(plan["recompute"] == Json::array());
    CHECK(plan["fsdp"] == false);
    CHECK(read["unknown"].empty());
    CHECK(imported(folder, "base.yaml")["engine"] == "automodel"); // DTensor trains that policy.
    // Alone, the file below is told as missing.
    CHECK(imported(folder, "run.yaml --alone")["unknown"].dump().find("base.yaml") != std::string::npos);
}

TEST_CASE("import: a configuration of NeMo's launcher") {
    const Folder folder;
    folder.write("train.yaml", nemo);
    const Json plan = imported(folder, "train.yaml")["plan"];
    CHECK(plan["mesh"]["gpus"] == 32);
    CHECK(plan["mesh"]["pp"] == 4);
    CHECK(plan["mesh"]["vpp"] == 2);
    CHECK(plan["mbs"] == 2);
    CHECK(plan["precision"] == "fp8-tensor");
    CHECK(plan["gradients"] == "bf16");
    CHECK(plan["recompute"] == Json::array({"core_attn"}));
    CHECK(plan["model"]["intermediate_size"] == 8192);
    CHECK(plan["model"]["vocab_size"] == 32000);
    CHECK(plan["model"]["mlp_gated"] == true);
    CHECK(plan["model"]["tie_word_embeddings"] == false);

    folder.write("t5.yaml",
                 "trainer: {devices: 8}\nmodel:\n  tensor_model_parallel_size: 1\n  encoder: {num_layers: 12}\n");
    check_line(folder.run("moe-plan import t5.yaml --hardware h100"), 2, "t5.yaml:4: model.encoder.num_layers");
}

TEST_CASE("import: slime's batch is what its rollouts give each step") {
    const Folder folder;
    folder.write("run.sh",
                 "python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-batch-size 32 "
                 "--n-samples-per-prompt 8 --num-steps-per-rollout 2 --expert-model-parallel-size 8 "
                 "--hf-checkpoint /root/Qwen3-30B-A3B --recompute-granularity full --recompute-method uniform "
                 "--recompute-num-layers 1\n");
    const Json plan = imported(folder, "run.sh --seq 8192")["plan"];
    CHECK(plan["workload"]["gbs"] == 128);
    CHECK(plan["precision"] == "bf16");
    CHECK(plan["mesh"]["ep"] == 8);
    CHECK(plan["recompute"] == Json::array({"full"}));

    folder.write("more.txt", "--global-batch-size 64\n");
    CHECK(imported(folder, "run.sh more.txt --seq 8192")["plan"]["workload"]["gbs"] == 64); // What is set counts.
}

TEST_CASE("import: files that only a run could read are refused with what to give instead") {
    const Folder folder;
    folder.write("recipe.py", "import nemo_run as run\n");
    check_line(folder.run("moe-plan import recipe.py --hardware h100"), 2, "recipe.py: Python is not read");
    folder.write("nemo2.yaml", "_target_: nemo.collections.llm.api.pretrain\nmodel: {config: {num_layers: 2}}\n");
    check_line(folder.run("moe-plan import nemo2.yaml --hardware h100"), 2,
               "nemo2.yaml:1: a recipe of NeMo 2 is not read");
    folder.write("other.yaml", "apiVersion: v1\nkind: Job\n");
    check_line(folder.run("moe-plan import other.yaml --hardware h100"), 2, "settings named apiVersion, kind are");
}

TEST_CASE("import: the model is the config.json in the folder that the file names") {
    const Folder folder;
    folder.write("run.sh", std::string(verl) + "\n");
    const std::string there = folder.path() + "/config.json";
    folder.write("config.json",
                 "{\"architectures\": [\"Qwen3ForCausalLM\"], \"hidden_size\": 1024, \"num_hidden_layers\": 12, "
                 "\"num_attention_heads\": 8, \"num_key_value_heads\": 8, \"head_dim\": 128, "
                 "\"intermediate_size\": 3072, \"vocab_size\": 4096, \"tie_word_embeddings\": true, "
                 "\"rms_norm_eps\": 1e-6, \"rope_theta\": 1000000, \"hidden_act\": \"silu\"}");
    folder.write("args.txt", "--bf16 --micro-batch-size 1 --global-batch-size 8 --seq-length 2048 --hf-checkpoint " +
                                 folder.path() + "\n");
    CHECK(imported(folder, "args.txt --gpus 8")["plan"]["model"]["num_hidden_layers"] == 12);
    check_line(folder.run("moe-plan import args.txt --alone --gpus 8 --hardware h100"), 2,
               "give its config.json by --model");
}

TEST_CASE("import: sizes that only the caller of a script knows are told with what to give") {
    const Folder folder;
    folder.write(
        "run.sh",
        "torchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py --num-layers $2 --seq-length ${LENGTH} --bf16\n");
    check_line(folder.run("moe-plan import run.sh --hardware h100"), 2,
               "run.sh:1: --num-layers ${2} is not in the file: give a file with the command");
    check_line(folder.run("moe-plan import run.sh --hardware h100 --model Mixtral-8x7B"), 2,
               "run.sh:1: --seq-length ${LENGTH} is not in the file: give a file with the command");
    folder.write("run.sh", "torchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py --num-layers ${LAYERS} --bf16\n");
    check_line(folder.run("moe-plan import run.sh --hardware h100"), 2,
               "run.sh:1: --num-layers ${LAYERS} is not in the file: give the script that sets it");
    folder.write("run.sh", "torchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py --micro-batch-size $3 --bf16\n");
    check_line(folder.run("moe-plan import run.sh --hardware h100"), 2, "run.sh:1: --micro-batch-size ${3} is not in");
}

TEST_CASE("import: references and files that name themselves come to an end") {
    const Folder folder;
    std::string doubled = "trainer: {devices: 8}\nmodel:\n  tensor_model_parallel_size: 1\n  a0: ${.a0}\n";
    for (int i = 1; i < 60; ++i)
        doubled +=
            "  a" + std::to_string(i) + ": ${.a" + std::to_string(i - 1) + "}${.a" + std::to_string(i - 1) + "}\n";
    folder.write("doubled.yaml", doubled);
    check_line(folder.run("moe-plan import doubled.yaml --gpus 8 --hardware h100"), 2, "says no layers");
    folder.write("self.yaml", "defaults: [self.yaml, self.yaml]\na: 1\n");
    check_line(folder.run("moe-plan import self.yaml --hardware h100"), 2, "self.yaml: too many files under defaults");
}
