// Which profile a published name stands for, and that names of models made of others stand for none.
#include "planner/base/profile.hpp"
#include "tests/tools/verbs/command.hpp"
#include "tools/import/named_model.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <string>

using namespace moe;
using moe::test::document;
using moe::test::Folder;

namespace {

std::string profile_of(const std::string& published) {
    tools::ReaderTable reader;
    reader.names = {"--model"};
    tools::SettingsFile file;
    tools::Setting setting;
    setting.name = "--model";
    setting.values = {published};
    file.set(setting);
    return tools::named_model(file, reader, true).model;
}

// Flags of a dense Llama-like model, as Megatron-LM has them.
std::string sizes(const std::string& others) {
    return "torchrun --nproc_per_node 8 pretrain_gpt.py --swiglu --num-layers 28 --hidden-size 3584 "
           "--ffn-hidden-size 18944 --num-attention-heads 28 --group-query-attention --num-query-groups 4 "
           "--use-rotary-position-embeddings --disable-bias-linear --add-qkv-bias --normalization RMSNorm "
           "--norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 152064 --untie-embeddings-and-output-weights "
           "--micro-batch-size 1 --global-batch-size 8 --seq-length 4096 --bf16 " +
           others + "\n";
}

} // namespace

TEST_CASE("import: every profile's own name is that profile") {
    for (const std::string& name : profile_names("models")) CHECK(profile_of("somebody/" + name) == name);
}

TEST_CASE("import: published names of dense models and of those with experts") {
    struct Named {
        const char* published;
        const char* profile;
    };
    constexpr Named names[] = {
        {"Qwen/Qwen2.5-0.5B-Instruct", "Qwen2.5-0.5B"},
        {"Qwen/Qwen2.5-7B", "Qwen2.5-7B"},
        {"Qwen/Qwen2.5-72B-Instruct", "Qwen2.5-72B"},
        {"Qwen/Qwen2.5-Math-7B-Instruct", "Qwen2.5-Math-7B"},
        {"Qwen/Qwen2-7B-Instruct", "Qwen2-7B"},
        {"Qwen/Qwen3-4B-Instruct-2507", "Qwen3-4B"},
        {"/models/Qwen3-1.7B-Base/", "Qwen3-1.7B"},
        {"meta-llama/Llama-3.1-8B-Instruct", "Llama3.1-8B"},
        {"meta-llama/Meta-Llama-3.1-70B", "Llama3.1-70B"},
        {"meta-llama/Llama-3.2-1B-Instruct", "Llama3.2-1B"},
        {"deepseek-ai/deepseek-llm-7b-chat", "DeepSeek-LLM-7B"},
        {"deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "DeepSeek-R1-Distill-Qwen-7B"},
        {"Qwen/Qwen3.5-4B-Base", "Qwen3.5-4B"},
        {"Qwen/Qwen3-Coder-480B-A35B-Instruct", "Qwen3-Coder-480B-A35B"},
        {"zai-org/GLM-4.7-FP8", "GLM-4.7"},
        {"moonshotai/Kimi-K2.5", "Kimi-K2.5"},
        {"MiniMaxAI/MiniMax-M2.5", "MiniMax-M2.5"},
    };
    for (const Named& named : names) {
        CAPTURE(named.published);
        CHECK(profile_of(named.published) == named.profile);
    }
}

TEST_CASE("import: models made of others, and beside them, have no profile by the others' names") {
    for (const char* published : {"Qwen/Qwen3-Embedding-8B", "somebody/Qwen3-8B-Embedding", "Qwen/Qwen3-Reranker-8B",
                                  "Qwen/Qwen2.5-VL-7B-Instruct", "somebody/Qwen3.5-35B-A3B-VL", "Qwen/Qwen2.5-Omni-7B",
                                  "nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16", "Qwen/Qwen2.5-Math-7B-PRM800K",
                                  "somebody/Qwen2.5-Math-72B-RM", "somebody/Llama-3.1-8B-Instruct-Reward",
                                  "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "somebody/Qwen3-30B-A3B-EAGLE3",
                                  "cerebras/GLM-4.5-Air-REAP-82B-A12B", "meta-llama/Llama-3.2-11B-Vision-Instruct",
                                  "Qwen/Qwen2.5-Coder-3B", "Qwen/Qwen2.5-1.5B_pruned"}) {
        CAPTURE(published);
        CHECK(profile_of(published).empty());
    }
}

TEST_CASE("import: of profiles with the file's sizes the one that it names is taken, else the first") {
    const Folder folder;
    const auto model = [&folder](const std::string& others) {
        folder.write("run.sh", sizes(others));
        const auto read =
            document(folder.run("moe-plan import run.sh --from megatron-lm --hardware h100 --gpus 8 --json"));
        return read["plan"]["model"]["name"].get<std::string>();
    };
    CHECK(model("") == "Qwen2-7B");
    CHECK(model("--hf-checkpoint /root/Qwen2.5-7B-Instruct") == "Qwen2.5-7B");
    CHECK(model("--hf-checkpoint /root/Qwen3-8B") == "Qwen2-7B"); // whose sizes are others
}
