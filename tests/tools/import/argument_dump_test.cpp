// The verb import on logs: the list of all arguments that Megatron-LM prints as it starts.
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <map>

using moe::test::check_line;
using moe::test::document;
using moe::test::Folder;
using Json = nlohmann::ordered_json;

namespace {

// What a job of Mixtral-8x7B prints, with defaults, derived values and lines that are none of the list.
std::map<std::string, std::string> mixtral_arguments() {
    return {
        {"add_bias_linear", "False"},
        {"adlr_autoresume_interval", "1000"},
        {"apply_rope_fusion", "True"},
        {"attention_dropout", "0.0"},
        {"bf16", "True"},
        {"cuda_graph_modules", "[]"},
        {"dsa_indexer_skip_topk_offset", "0"},
        {"expert_model_parallel_size", "8"},
        {"expert_tensor_parallel_size", "1"},
        {"ffn_hidden_size", "14336"},
        {"fp16", "False"},
        {"global_batch_size", "256"},
        {"group_query_attention", "True"},
        {"hidden_dropout", "0.0"},
        {"hidden_size", "4096"},
        {"kv_channels", "128"},
        {"layernorm_epsilon", "1e-05"},
        {"main_grads_dtype", "torch.float32"},
        {"micro_batch_size", "1"},
        {"moe_grouped_gemm", "True"},
        {"moe_layer_freq", "1"},
        {"moe_router_topk", "2"},
        {"moe_token_dispatcher_type", "alltoall"},
        {"moe_z_loss_coeff", "None"},
        {"muon_momentum", "0.9"},
        {"normalization", "RMSNorm"},
        {"num_attention_heads", "32"},
        {"num_experts", "8"},
        {"num_layers", "32"},
        {"num_query_groups", "8"},
        {"pipeline_model_parallel_size", "4"},
        {"position_embedding_type", "rope"},
        {"recompute_granularity", "selective"},
        {"recompute_modules", "['core_attn', 'moe_act']"},
        {"rotary_base", "1000000"},
        {"seq_length", "4096"},
        {"sequence_parallel", "False"},
        {"swiglu", "True"},
        {"tensor_model_parallel_size", "1"},
        {"untie_embeddings_and_output_weights", "True"},
        {"use_distributed_optimizer", "True"},
        {"vocab_size", "32000"},
        {"world_size", "64"},
    };
}

std::string printed(const std::map<std::string, std::string>& arguments, const std::string& before = "") {
    std::string text = before + "------------------------ arguments ------------------------\n";
    for (const auto& [name, value] : arguments)
        text += fmt::format("{}  {} {:.>{}} {}\n", before, name, "", 48 - name.size(), value);
    return text + before + "-------------------- end of arguments ---------------------\n";
}

Json imported(const Folder& folder, const std::string& words) {
    return document(folder.run("moe-plan import " + words + " --json"));
}

} // namespace

TEST_CASE("import: the list of arguments in a log becomes the plan of the job") {
    const Folder folder;
    folder.write("train.log", "[Rank 0] starting ...\n" + printed(mixtral_arguments(), "0: ") +
                                  "0:  iteration 1/ 10 | elapsed time per iteration (ms): 1000.0 |\n");
    const Json read = imported(folder, "train.log --hardware h100");
    CHECK(read["plan"]["model"]["name"] == "Mixtral-8x7B");
    const Json& mesh = read["plan"]["mesh"];
    CHECK(mesh["gpus"] == 64);
    CHECK(mesh["tp"] == 1);
    CHECK(mesh["pp"] == 4);
    CHECK(mesh["ep"] == 8);
    CHECK(read["plan"]["mbs"] == 1);
    CHECK(read["plan"]["workload"]["gbs"] == 256);
    CHECK(read["plan"]["workload"]["seq"] == 4096);
    CHECK(read["plan"]["precision"] == "bf16");
    CHECK(read["plan"]["recompute"] == Json::array({"core_attn", "moe_act"}));
    // What has its default, or is nothing that plans say, is not told one by one.
    CHECK(read["unknown"].empty());
    for (const Json& finding : read["findings"]) CHECK_MESSAGE(finding["severity"] != "warning", finding.dump());
}

TEST_CASE("import: of a log whose job began again the last list counts") {
    const Folder folder;
    auto again = mixtral_arguments();
    again["micro_batch_size"] = "2";
    folder.write("train.log", printed(mixtral_arguments()) + "restarted\n" + printed(again));
    CHECK(imported(folder, "train.log --hardware h100")["plan"]["mbs"] == 2);
}

TEST_CASE("import: the vocabulary of a log is that of the tokenizer it was built with") {
    const Folder folder;
    auto arguments = mixtral_arguments();
    arguments["vocab_size"] = "None";
    arguments["hidden_size"] = "2048"; // no profile
    arguments["moe_layer_freq"] = "[0, 1, 1, 1]";
    arguments["num_layers"] = "4";
    const std::string log =
        printed(arguments) + " > padded vocab (size: 151936) with 0 dummy tokens (new size: 151936)\n";
    folder.write("train.log", log);
    const Json model = imported(folder, "train.log --hardware h100")["plan"]["model"];
    CHECK(model["vocab_size"] == 151936);
    CHECK(model["num_hidden_layers"] == 4);
}

TEST_CASE("import: lines of a list without what stands around them are read, with what they lack given") {
    const Folder folder;
    std::string lines = printed(mixtral_arguments());
    lines.erase(0, lines.find('\n') + 1);
    lines.erase(lines.find("  world_size"));
    folder.write("pasted.txt", lines);
    check_line(folder.run("moe-plan import pasted.txt --hardware h100"), 2,
               "pasted.txt: does not say how many processes");
    CHECK(imported(folder, "pasted.txt --hardware h100 --gpus 64")["plan"]["mesh"]["ep"] == 8);
}

TEST_CASE("import: FP16 is read as BF16, and told") {
    const Folder folder;
    auto arguments = mixtral_arguments();
    arguments["bf16"] = "False";
    arguments["fp16"] = "True";
    folder.write("train.log", printed(arguments));
    const Json read = imported(folder, "train.log --hardware h100");
    CHECK(read["plan"]["precision"] == "bf16");
    bool told = false;
    for (const Json& finding : read["findings"])
        told = told || finding["message"].get<std::string>().find("--fp16: read as --bf16") != std::string::npos;
    CHECK(told);
}

TEST_CASE("import: tensor parallelism is read where no sequence parallelism is set") {
    const Folder folder;
    folder.write("args.txt",
                 "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --seq-length 1024 --vocab-size "
                 "50257 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --bf16\n");
    const Json read = imported(folder, "args.txt --hardware h100 --gpus 8");
    CHECK(read["plan"]["mesh"]["tp"] == 4);
}
