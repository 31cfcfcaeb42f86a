// Parameter counts and FLOPs per token against published figures, and against sums done by hand.
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json_object.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/model/model.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <filesystem>
#include <string>

namespace fs = std::filesystem;

namespace {

// GFLOP per token as recomputed from the models' configurations and checked against the Megatron-Bridge performance
// tables, releases 25.09 to 26.08 (tokens/s and TFLOP/s of the same row).
struct Published {
    const char* model;
    std::int64_t seq;
    double gflop;
};
constexpr Published published[] = {
    {"DeepSeek-V3", 4096, 259.99},      {"Kimi-K2", 4096, 204.48},
    {"DeepSeek-V4-Flash", 4096, 90.78}, {"DeepSeek-V4-Pro", 4096, 322.56},
    {"Qwen3-235B-A22B", 4096, 148.03},  {"Qwen3-235B-A22B", 131072, 734.70},
    {"Qwen3-30B-A3B", 4096, 23.01},     {"GPT-OSS-120B", 4096, 32.63},
    {"GPT-OSS-20B", 4096, 22.91},       {"Qwen3-Next-80B-A3B", 4096, 25.13},
    {"Qwen2-57B-A14B", 4096, 84.65},    {"Mixtral-8x22B", 4096, 242.17},
    {"Mixtral-8x22B", 131072, 504.32},  {"Llama3-8B", 8192, 51.47},
    {"Llama3-70B", 8192, 449.22},       {"Llama3.1-405B", 8192, 2523.96},
    {"Llama4-Maverick", 8192, 108.89},  {"Llama4-Scout", 8192, 108.89},
    {"Grok-1", 8192, 521.74},           {"Nemotron-4-15B", 4096, 89.16},
    {"Nemotron-4-340B", 4096, 2061.31}, {"GPT3-175B", 2048, 1061.95},
    {"Nemotron-3-Nano", 8192, 22.28},   {"Nemotron-3-Super", 8192, 84.73},
    {"Nemotron-3-Ultra", 8192, 358.91}, {"Nemotron-3.5-Lightning", 8192, 28.15},
    {"Nemotron-H-56B", 8192, 340.24},
};

// The figures without MTP layers, where the model has some.
constexpr Published without_mtp[] = {
    {"DeepSeek-V3", 4096, 249.81},           {"DeepSeek-V4-Flash", 4096, 85.70}, {"DeepSeek-V4-Pro", 4096, 311.80},
    {"Qwen3-Next-80B-A3B", 4096, 22.74},     {"Nemotron-3-Super", 8192, 75.37},  {"Nemotron-3-Ultra", 8192, 335.61},
    {"Nemotron-3.5-Lightning", 8192, 22.28},
};

double gflop(const moe::model::Model& model, std::int64_t seq, int tp = 1) {
    return moe::model::model_flops_per_token(model, seq, tp) / 1e9;
}

const char* dense = R"({"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 250})";

} // namespace

TEST_CASE("FLOPs per token match the published tables within 0.1 %") {
    for (const Published& row : published) {
        CAPTURE(row.model);
        CAPTURE(row.seq);
        CHECK(gflop(moe::families::load_model(row.model), row.seq) == nearly(row.gflop).epsilon(1e-3));
    }
    for (const Published& row : without_mtp) {
        CAPTURE(row.model);
        moe::model::Model model = moe::families::load_model(row.model);
        REQUIRE(!model.mtp.empty());
        model.mtp.clear();
        CHECK(gflop(model, row.seq) == nearly(row.gflop).epsilon(1e-3));
    }
}

TEST_CASE("parameter counts match every profile's own within 0.5 %") {
    int models = 0;
    for (const auto& entry : fs::directory_iterator(fs::path(moe::profiles_folder()) / "models")) {
        if (entry.path().extension() != ".json") continue;
        const std::string path = entry.path().string();
        CAPTURE(path);
        const moe::JsonObject json = moe::JsonObject::parse(moe::read_file(path), path);
        moe::model::Model model = moe::families::load_model(path);
        if (model.hybrid && model.mtp.size() > 1) model.mtp.resize(1); // published depths share one layer, ours do not
        const moe::model::ParameterCount count = moe::model::count_parameters(model);
        if (!json.has("param_counts")) continue; // our own small models carry none
        ++models;
        const moe::JsonObject known = json.object("param_counts");
        CHECK(static_cast<double>(count.total) == nearly(known.number("total", 1, 1e15)).epsilon(5e-3));
        CHECK(static_cast<double>(count.total_no_mtp) == nearly(known.number("total_no_mtp", 1, 1e15)).epsilon(5e-3));
        CHECK(static_cast<double>(count.active) == nearly(known.number("active", 1, 1e15)).epsilon(5e-3));
        CHECK(static_cast<double>(count.active_no_embed) ==
              nearly(known.number("active_no_embed", 1, 1e15)).epsilon(5e-3));
    }
    CHECK(models >= 49);
}

TEST_CASE("a small dense model by hand") {
    const moe::model::Model model = moe::families::model_from_json(dense, "small.json");
    // Elements per layer: q 64x64, k and v 64x32 each, o 64x64, three 64x96 matrices, two norms; then final norm, two
    // embeddings.
    const std::int64_t matrices = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96;
    const std::int64_t total = 2 * (matrices + 2 * 64) + 64 + 2 * 250 * 64;
    CHECK(moe::model::count_parameters(model).total == total);
    CHECK(moe::model::count_parameters(model).active_no_embed == total - 250 * 64);
    // Attention at half: 100 / 2 keys, each one multiply-accumulate per column in QK and in PV. Vocabulary padded to
    // 256.
    const double macs = 2.0 * (static_cast<double>(matrices) + 50.0 * (64 + 64)) + 64.0 * 256.0;
    CHECK(moe::model::model_flops_per_token(model, 100) == nearly(6.0 * macs).epsilon(1e-12));
    // TP 4 pads the vocabulary to a multiple of 512.
    CHECK(moe::model::model_flops_per_token(model, 100, 4) == nearly(6.0 * (macs + 64.0 * 256.0)).epsilon(1e-12));
    CHECK(model.padded_vocab(1) == 256);
    CHECK(model.padded_vocab(4) == 512);
}

TEST_CASE("only top-k and shared experts count as FLOPs, all of them as parameters") {
    const auto config = [](int experts, int top_k) {
        return moe::families::model_from_json(
            fmt::format(R"({{"architectures": ["Qwen2MoeForCausalLM"], "hidden_size": 64, "num_hidden_layers": 3,
                "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 256, "num_experts": {},
                "num_experts_per_tok": {}, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}})",
                        experts, top_k),
            "small.json");
    };
    const double expert = 3 * 64 * 32;
    CHECK(moe::model::model_flops_per_token(config(8, 2), 64) == moe::model::model_flops_per_token(config(16, 2), 64));
    CHECK(moe::model::model_flops_per_token(config(8, 4), 64) - moe::model::model_flops_per_token(config(8, 2), 64) ==
          6 * 3 * 2 * expert);
    // 8 more experts per layer, with a router column each.
    CHECK(moe::model::count_parameters(config(16, 2)).total - moe::model::count_parameters(config(8, 2)).total ==
          3 * 8 * (3 * 64 * 32 + 64));
    CHECK(moe::model::count_parameters(config(16, 2)).active - moe::model::count_parameters(config(8, 2)).active ==
          3 * 8 * 64);
}
