// The verb import on files of programs that hand their settings to Megatron-LM: ms-swift and Primus.
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <filesystem>

using moe::test::check_line;
using moe::test::document;
using moe::test::Folder;
using Json = nlohmann::ordered_json;

namespace {

const char* swift =
    "NPROC_PER_NODE=8 NNODES=2 \\\nmegatron sft --model Qwen/Qwen3-30B-A3B-Base --max_length 2048 \\\n"
    "  --expert_model_parallel_size 8 --pipeline_model_parallel_size 2 --tensor_model_parallel_size 2 \\\n"
    "  --sequence_parallel true --micro_batch_size 2 --global_batch_size 64 --dataset 'a#5' 'b#7'";

const char* primus = "modules:\n  pre_trainer:\n    framework: megatron\n    config: pre_trainer.yaml\n"
                     "    model: ${SIZE:mixtral_8x7B_v0.1}.yaml\n    overrides:\n"
                     "      expert_model_parallel_size: ${EXPERTS:8}\n      global_batch_size: 64\n"
                     "      recompute_granularity: null\n      use_other_new: true\n";

Json imported(const Folder& folder, const std::string& words) {
    return document(folder.run("moe-plan import " + words + " --hardware h100 --json"));
}

bool told(const Json& read, const std::string& words) {
    for (const Json& finding : read["findings"])
        if (finding["message"].get<std::string>().find(words) != std::string::npos) return true;
    return false;
}

bool unknown(const Json& read, const std::string& words) {
    return read["unknown"].dump().find(words) != std::string::npos;
}

} // namespace

TEST_CASE("import: a command of ms-swift is read with that program's defaults") {
    const Folder folder;
    folder.write("sft.sh", swift);
    const Json read = imported(folder, "sft.sh"), plan = read["plan"];
    CHECK(plan["model"]["name"] == "Qwen3-30B-A3B");
    CHECK(plan["mesh"]["gpus"] == 16);
    CHECK(plan["mesh"]["tp"] == 2);
    CHECK(plan["mesh"]["pp"] == 2);
    CHECK(plan["mesh"]["ep"] == 8);
    CHECK(plan["mbs"] == 2);
    CHECK(plan["workload"]["gbs"] == 64);
    CHECK(plan["workload"]["seq"] == 2048);
    CHECK(plan["precision"] == "bf16");
    CHECK(plan["recompute"] == Json::array({"core_attn"})); // nothing in the file says so
    CHECK(read["unknown"].empty());
    CHECK_FALSE(told(read, "trains all weights"));

    folder.write("none.sh", std::string(swift) + " --recompute_granularity none --tuner_type lora\n");
    const Json none = imported(folder, "none.sh");
    CHECK(none["plan"]["recompute"] == Json::array());
    CHECK(told(none, "--tuner-type lora: a plan trains all weights"));
}

TEST_CASE("import: a configuration of Primus is read over the files that it names") {
    const Folder folder;
    const auto make = [&folder](const std::string& name, const std::string& text) {
        std::filesystem::create_directories(std::filesystem::path(folder.path()) /
                                            std::filesystem::path(name).parent_path());
        folder.write(name, text);
    };
    make("examples/run.yaml", primus);
    make("primus/configs/modules/megatron/pre_trainer.yaml",
         "extends:\n  - base.yaml\nglobal_batch_size: 16\nseq_length: 4096\n");
    make("primus/configs/modules/megatron/base.yaml",
         "seq_length: 1024\nmicro_batch_size: 2\nbf16: true\nuse_distributed_optimizer: true\n"
         "recompute_granularity: full\nrecompute_method: uniform\nrecompute_num_layers: 1\nturbo_old: 3\n");
    make("primus/configs/models/megatron/mixtral_8x7B_v0.1.yaml",
         "num_layers: 8\nhidden_size: 2048\nnum_attention_heads: 16\nffn_hidden_size: 4096\nswiglu: true\n"
         "add_bias_linear: false\nnum_experts: 16\nmoe_router_topk: 2\nvocab_size: 32000\nnormalization: RMSNorm\n");
    const Json read = imported(folder, "examples/run.yaml --gpus 16"), plan = read["plan"];
    CHECK(plan["model"]["num_hidden_layers"] == 8);
    CHECK(plan["model"]["hidden_size"] == 2048);
    CHECK(plan["mesh"]["ep"] == 8);
    CHECK(plan["mbs"] == 2);
    CHECK(plan["workload"]["gbs"] == 64);
    CHECK(plan["workload"]["seq"] == 4096);
    CHECK(plan["recompute"] == Json::array());
    CHECK(unknown(read, "--use-other-new"));
    CHECK_FALSE(unknown(read, "turbo-old")); // a default of the program

    folder.write("env.sh", "export EXPERTS=4\n");
    CHECK(imported(folder, "env.sh examples/run.yaml --gpus 16")["plan"]["mesh"]["ep"] == 4);

    // Alone, the model is the one that the file is named after, and what was not found is told.
    const Json alone = imported(folder, "examples/run.yaml --gpus 16 --alone --seq 4096");
    CHECK(alone["plan"]["model"]["name"] == "Mixtral-8x7B");
    CHECK(unknown(alone, "primus/configs/modules/megatron"));
}

TEST_CASE("import: a framework of Primus that is not read is refused with its line") {
    const Folder folder;
    folder.write("run.yaml", "modules:\n  pre_trainer:\n    framework: maxtext\n    model: a.yaml\n");
    check_line(folder.run("moe-plan import run.yaml --hardware h100 --gpus 8"), 2,
               "run.yaml:3: framework: maxtext is not read");
}

TEST_CASE("import: Primus' torchtitan names its precision by converters, whose other settings are only defaults") {
    const Folder folder;
    const auto file = [&folder](const std::string& overrides) {
        folder.write("run.yaml", "modules:\n  pre_trainer:\n    framework: torchtitan\n    overrides:\n"
                                 "      quantize: {linear: {mx: {recipe_name: mxfp8_cublas}}}\n"
                                 "      model: {name: llama3, flavor: 8B, converters: [primus_turbo" +
                                     overrides);
        return imported(folder, "run.yaml --gpus 8")["plan"];
    };
    const std::string rest = "]}\n      training: {local_batch_size: 2, global_batch_size: -1, seq_len: 8192}\n";
    const Json plain = file(rest), fp8 = file(", quantize.linear.float8" + rest);
    CHECK(plain["precision"] == "bf16");
    CHECK(plain["workload"]["gbs"] == 16); // -1: one micro-batch of each rank
    CHECK(fp8["precision"] == "fp8-tensor");
    CHECK(file("]}\n      parallelism: {fsdp_reshard_after_forward: always}\n")["fsdp"] == true);
}

TEST_CASE("import: words for recomputation that stand for others") {
    const Folder folder;
    const auto recompute = [&folder](const std::string& words) {
        folder.write("args.txt", "--use-mcore-models --bf16 --seq-length 4096 --micro-batch-size 1 " + words);
        return imported(folder, "args.txt --model Mixtral-8x7B --gpus 8")["plan"]["recompute"];
    };
    CHECK(recompute("--recompute-activations") == Json::array({"core_attn"}));
    CHECK(recompute("--checkpoint-activations") == Json::array({"full"}));
    CHECK(recompute("--recompute-method uniform --recompute-num-layers 1") == Json::array());
    CHECK(recompute("--recompute-granularity full --recompute-method block --recompute-num-layers 0") == Json::array());
}

TEST_CASE("import: a model of Mamba's layers by a ratio is refused, since no plan would have them") {
    const Folder folder;
    folder.write("run.yaml", "modules:\n  pre_trainer:\n    framework: megatron\n    overrides:\n"
                             "      model_type: mamba\n      num_layers: 8\n      hidden_size: 1024\n");
    check_line(folder.run("moe-plan import run.yaml --hardware h100 --gpus 8"), 2, "run.yaml:5: --model-type mamba");
}
