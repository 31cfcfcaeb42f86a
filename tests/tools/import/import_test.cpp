// The verb import on launch files in the style of published ones: what is read, what is told, what is refused.
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

using moe::test::check_line;
using moe::test::document;
using moe::test::Folder;
using Json = nlohmann::ordered_json;

namespace {

// A script with variables, arrays, comments and a branch, as people write them.
const std::string mixtral = R"(#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=${GPUS:-8}
NODES=${SLURM_NNODES:-"8"}
EP=8
DIST=(--nproc_per_node $GPUS --nnodes $NODES --master_addr ${MASTER_ADDR:-localhost})
MODEL=(
    --num-layers 32 --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights
    --position-embedding-type rope --rotary-base 1000000
    --seq-length 4096 --max-position-embeddings 32768
    --attention-dropout 0.0 --hidden-dropout 0.0
)
MOE=(
    --num-experts 8 --moe-router-topk 2
    --moe-token-dispatcher-type alltoall
#   --moe-permute-fusion
    --moe-grouped-gemm
)
TRAIN="--micro-batch-size 1 --global-batch-size $((GPUS * NODES * 4)) --lr 1e-4 --bf16"
if [ "$EP" -gt 1 ]; then
    MOE+=(--expert-model-parallel-size $EP)
fi
torchrun ${DIST[@]} pretrain_gpt.py ${MODEL[@]} "${MOE[@]}" $TRAIN \
    --pipeline-model-parallel-size 4 --use-distributed-optimizer --overlap-grad-reduce \
    --data-path $DATA --save "$(pwd)/out" --made-up-flag 3 --sequence-parallel $EXTRA
)";

Json imported(const Folder& folder, const std::string& words) {
    return document(folder.run("moe-plan import " + words + " --json"));
}

bool finds(const Json& document, const std::string& severity, const std::string& field, const std::string& words) {
    for (const Json& finding : document["findings"])
        if (finding["severity"] == severity && finding["field"] == field &&
            finding["message"].get<std::string>().find(words) != std::string::npos)
            return true;
    return false;
}

} // namespace

TEST_CASE("import: a launch script of Megatron-LM becomes a plan that replays") {
    const Folder folder;
    folder.write("train.sh", mixtral);
    const Json read = imported(folder, "train.sh --hardware h100 --out plan.json");
    CHECK(read["engine"] == "megatron-lm");
    const Json& plan = read["plan"];
    CHECK(plan["model"]["name"] == "Mixtral-8x7B");
    CHECK(plan["workload"]["gbs"] == 256);
    CHECK(plan["workload"]["seq"] == 4096);
    CHECK(plan["mesh"]["gpus"] == 64);
    CHECK(plan["mesh"]["pp"] == 4);
    CHECK(plan["mesh"]["dp"] == 16);
    CHECK(plan["mesh"]["ep"] == 8);
    REQUIRE(read["unknown"].size() == 1);
    CHECK(read["unknown"][0]["setting"] == "--made-up-flag");
    CHECK(read["unknown"][0]["line"] == 27);
    CHECK(finds(read, "hint", "--moe-permute-fusion", "is not set"));
    CHECK(finds(read, "hint", "vpp", "faster"));
    CHECK(document(folder.run("moe-plan replay plan.json --json"))["step_seconds"] > 0.0);
    // In words: the same, for people.
    const auto printed = folder.run("moe-plan import train.sh --hardware h100");
    CHECK(printed.status == 0);
    CHECK(printed.out.find("Mixtral-8x7B on 64 x h100") != std::string::npos);
    CHECK(printed.out.find("--made-up-flag") != std::string::npos);
}

TEST_CASE("import: documents that are masked, in the words of a release and with the flags alone") {
    const Folder folder;
    folder.write("train.sh", mixtral + "\n");
    folder.write("flags.txt", "--reset-position-ids --reset-attention-mask --eod-mask-loss\n");
    folder.write("loss.txt", "--eod-mask-loss --calculate-per-token-loss\n");
    folder.write("all.txt", "--reset-position-ids --reset-attention-mask --eod-mask-loss --calculate-per-token-loss "
                            "--dataloader-inter-document-masking\n");
    const auto documents = [](const Json& read) { return read["plan"]["documents"].get<std::string>(); };
    CHECK(documents(imported(folder, "train.sh loss.txt --hardware h100")) == "ignore");
    CHECK(documents(imported(folder, "train.sh all.txt --hardware h100")) == "mask");
    const Json flags = imported(folder, "train.sh flags.txt --hardware h100");
    CHECK(documents(flags) == "mask");
    CHECK(finds(flags, "warning", "documents", "--dataloader-inter-document-masking"));
    CHECK(documents(imported(folder, "train.sh flags.txt --hardware h100 --stack bridge-26.02")) == "mask");
}

TEST_CASE("import: broken rules and plans that do not fit are errors, with the rule's source") {
    const Folder folder;
    folder.write("train.sh", mixtral + "\n");
    folder.write("more.txt", "--delay-wgrad-compute --micro-batch-size 4 --pipeline-model-parallel-size 1\n");
    const Json read = imported(folder, "train.sh more.txt --hardware h100");
    CHECK(read["plan"]["mbs"] == 4);
    CHECK(finds(read, "error", "delay_wgrad", "megatron-core"));
    CHECK(finds(read, "error", "memory", "does not fit"));
}

TEST_CASE("import: a recipe of arguments as YAML, with the older words of a release") {
    const Folder folder;
    folder.write("recipe.yaml", R"(DEPENDENCIES:
  image: some/image
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: '32'
ARGS:
  num_layers: 94
  hidden_size: 4096
  ffn_hidden_size: 12288
  num_attention_heads: 64
  kv_channels: 128
  group_query_attention: true
  num_query_groups: 4
  qk_layernorm: true
  normalization: RMSNorm
  norm_epsilon: 1e-6
  swiglu: true
  disable_bias_linear: true
  untie_embeddings_and_output_weights: true
  position_embedding_type: rope
  num_experts: 128
  moe_ffn_hidden_size: 1536
  moe_router_topk: 8
  moe_router_pre_softmax: false
  tensor_model_parallel_size: ${TP:-2}
  pipeline_model_parallel_size: 8
  expert_model_parallel_size: 32
  expert_tensor_parallel_size: 1
  num_layers_per_virtual_pipeline_stage: 3
  account_for_embedding_in_pipeline_split: true
  account_for_loss_in_pipeline_split: true
  sequence_parallel: true
  overlap_moe_expert_parallel_comm: true
  delay_wgrad_compute: true
  moe_token_dispatcher_type: flex
  moe_enable_deepep: true
  recompute_granularity: selective
  recompute_modules: moe_act layernorm
  cuda_graph_impl: transformer_engine
  cuda_graph_scope: [moe_router, moe_preprocess]
  use_distributed_optimizer: ${DISTRIBUTED:-true}
  micro_batch_size: 1
  global_batch_size: 2048
  seq_length: 4096
  bf16: true
  fp8_format: e4m3
  fp8_recipe: blockwise
)");
    check_line(folder.run("moe-plan import recipe.yaml --hardware h100"), 2, "give --gpus");
    const Json read = imported(folder, "recipe.yaml --hardware h100 --gpus 256");
    const Json& plan = read["plan"];
    CHECK(plan["model"]["name"] == "Qwen3-235B-A22B");
    CHECK(plan["mesh"]["tp"] == 2);
    CHECK(plan["mesh"]["vpp"] == 4);
    CHECK(plan["layout"] == "Ett|(ttt|)*30ttL");
    CHECK(plan["dispatcher"] == "deepep");
    CHECK(plan["precision"] == "fp8-blockwise");
    CHECK(plan["ep_overlap"] == true);
    CHECK(plan["recompute"] == Json({"layernorm", "moe_act"}));
    CHECK(finds(read, "hint", "cuda_graph", "words of release"));
    CHECK(read["unknown"].empty());
}

TEST_CASE("import: sizes that no profile has become a model of their own") {
    const Folder folder;
    folder.write(
        "args.txt",
        "--num-layers 6 --hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 1024 --num-experts 16\n"
        "--moe-router-topk 4 --moe-ffn-hidden-size 256 --moe-layer-freq ([0]*2+[1]*4) --swiglu --qk-layernorm\n"
        "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights\n"
        "--position-embedding-type rope --seq-length 1024 --micro-batch-size 1 --global-batch-size 64\n"
        "--bf16 --moe-token-dispatcher-type alltoall --use-distributed-optimizer\n");
    check_line(folder.run("moe-plan import args.txt --hardware h100 --gpus 8"), 2, "args.txt: says no vocab");
    folder.write("vocab.txt", "--vocab-size 32000\n");
    const Json model = imported(folder, "args.txt vocab.txt --hardware h100 --gpus 8")["plan"]["model"];
    CHECK(model["hidden_size"] == 512);
    CHECK(model["mlp_only_layers"] == Json({0, 1}));
    // Beside a model that is named, what differs is told.
    const Json other = imported(folder, "args.txt --model Mixtral-8x7B --hardware h100 --gpus 8");
    CHECK(finds(other, "warning", "model.experts", "16 in the file, 8 in the model"));
}

TEST_CASE("import: overrides of Megatron-Bridge and a job of torchtitan") {
    const Folder folder;
    folder.write("run.yaml", R"(train:
  global_batch_size: 128
  micro_batch_size: 2
model:
  seq_length: 4096
  tensor_model_parallel_size: 2
  sequence_parallel: true
  pipeline_model_parallel_size: 4
  recompute_granularity: full
  recompute_method: uniform
  recompute_num_layers: 1
mixed_precision:
  _target_: megatron.bridge.training.mixed_precision.MixedPrecisionConfig
  bf16: true
  fp8: e4m3
  fp8_recipe: mxfp8
  params_dtype: {_target_: torch.bfloat16, _call_: false}
ddp:
  use_distributed_optimizer: true
logger:
  log_interval: 10
)");
    const Json bridge = imported(folder, "run.yaml --model Llama3-70B --hardware b200 --gpus 64")["plan"];
    CHECK(bridge["mesh"]["tp"] == 2);
    CHECK(bridge["precision"] == "mxfp8");
    CHECK(bridge["recompute"] == Json({"full"}));
    CHECK(bridge["mbs"] == 2);
    folder.write(
        "job.toml",
        "[model]\nname = \"qwen3\"\nflavor = \"30B-A3B\"\n[training]\nlocal_batch_size = 4\nglobal_batch_size = 512\n"
        "seq_len = 4096\n[parallelism]\nexpert_parallel_degree = 8\ndata_parallel_shard_degree = -1\n"
        "[activation_checkpoint]\nmode = \"full\"\n[metrics]\nlog_freq = 1\n");
    const Json read = imported(folder, "job.toml --hardware h100 --gpus 64");
    CHECK(read["engine"] == "torchtitan");
    CHECK(read["plan"]["model"]["name"] == "Qwen3-30B-A3B");
    CHECK(read["plan"]["mesh"]["ep"] == 8);
    CHECK(read["plan"]["mbs"] == 4);
    CHECK(read["plan"]["fsdp"] == true);
    CHECK(read["plan"]["recompute"] == Json({"full"}));
}

TEST_CASE("import: bad files are refused in one line, and nothing is written") {
    const Folder folder;
    folder.write("bad.yaml", "model: [1, 2\n");
    check_line(folder.run("moe-plan import bad.yaml --hardware h100 --out plan.json"), 2, "bad.yaml:2: not valid YAML");
    folder.write("bad.toml", "[model\nname = 1\n");
    check_line(folder.run("moe-plan import bad.toml --hardware h100"), 2, "bad.toml:1: not valid TOML");
    folder.write("bad.sh", "A='open\n");
    check_line(folder.run("moe-plan import bad.sh --hardware h100"), 2, "bad.sh:1");
    folder.write("none.sh", "echo hello\n");
    check_line(folder.run("moe-plan import none.sh --hardware h100"), 2, "starts no training");
    check_line(folder.run("moe-plan import none.sh --from nemo --hardware h100"), 2, "--from nemo: must be one of");
    folder.write("train.sh", mixtral);
    check_line(folder.run("moe-plan import train.sh --hardware h100 --gpus 48"), 2, "gpus = 48");
    for (const char* given : {"--gpus 0", "--gpus -8", "--seq 0"})
        check_line(folder.run(std::string("moe-plan import train.sh --hardware h100 ") + given), 2, given);
    check_line(folder.run("moe-plan import train.sh --hardware h100 --out train.sh"), 2, "train.sh");
    CHECK(!folder.holds("plan.json"));
    CHECK(folder.read("train.sh") == mixtral);
    folder.write("other.toml", "[training]\nseq_len = 1\n");
    check_line(folder.run("moe-plan import train.sh other.toml --hardware h100"), 2, "megatron-lm and of torchtitan");
}
