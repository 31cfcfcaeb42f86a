// Names of the tensors that families with modules of their own have in published files, and back under another plan.
#include "engine/train/huggingface.hpp"
#include "engine/weights/safetensors.hpp"
#include "planner/model/model.hpp"
#include "tests/engine/train/samples.hpp"
#include "tests/support/folder.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

using namespace moe;

namespace {

train::TrainOptions seeded(std::uint64_t seed) {
    train::TrainOptions options;
    options.seed = seed;
    return options;
}

void check_names(const std::shared_ptr<const model::Model>& model, const Fields& split,
                 const std::vector<std::string>& expected) {
    const Folder folder;
    CAPTURE(model->architecture);
    train::Trainer first(small_plan(model, 1, {}), seeded(3)), many(small_plan(model, 8, split), seeded(4));
    train::export_weights(first, folder / "hf");
    const std::vector<std::string> names = weights::StoredWeights(folder / "hf").names();
    for (const std::string& name : expected) {
        CAPTURE(name);
        CHECK(std::find(names.begin(), names.end(), name) != names.end());
    }
    CHECK(train::describe(train::load_weights(many, folder / "hf")) == "");
    REQUIRE(first.parameters().size() == many.parameters().size());
    for (const auto& [name, shape] : first.parameters()) {
        CAPTURE(name);
        CHECK(first.read_weight(name) == many.read_weight(name));
    }
}

} // namespace

TEST_CASE("gated delta nets: the matrices of both generations, towers beside them, multi-token prediction") {
    struct Generation {
        Fields fields;
        std::vector<std::string> names;
    };
    const std::string at = "model.layers.0.linear_attn.";
    const std::vector<Generation> generations{
        {{{"num_nextn_predict_layers", "1"}},
         {at + "in_proj_qkvz.weight", at + "in_proj_ba.weight", at + "conv1d.weight", at + "A_log", at + "norm.weight",
          "model.layers.0.mlp.experts.7.down_proj.weight", "mtp.fc.weight", "mtp.pre_fc_norm_hidden.weight",
          "mtp.layers.0.linear_attn.in_proj_qkvz.weight", "mtp.norm.weight"}},
        {{{"architectures", R"(["Qwen3_5MoeForCausalLM"])"}},
         {at + "in_proj_qkv.weight", at + "in_proj_z.weight", at + "in_proj_a.weight"}},
        {{{"architectures", R"(["Qwen3_5MoeForConditionalGeneration"])"},
          {"text_config", R"({"model_type": "qwen3_5_moe_text"})"},
          {"vision_config", R"({"depth": 2})"}},
         {"model.language_model.layers.0.linear_attn.in_proj_qkv.weight",
          "model.language_model.layers.3.mlp.experts.gate_up_proj", "model.language_model.embed_tokens.weight",
          "lm_head.weight"}}};
    for (const Generation& generation : generations)
        check_names(small_model("qwen3next", generation.fields), {{"tp", "2"}, {"ep", "4"}, {"cp", "2"}},
                    generation.names);
}

TEST_CASE("Nemotron 3: mixers by the names of published files, two layers for a depth of prediction") {
    const auto model = small_model("nemotron3", {{"num_nextn_predict_layers", "1"}});
    const train::Trainer first(small_plan(model, 1, {}), seeded(3));
    // Rates of heads are the logarithms of their numbers, steps lie within their bounds.
    CHECK(first.read_weight("model.layers.0.mamba.A_log")[2] == nearly(std::log(3.0)).epsilon(1e-6));
    for (const float bias : first.read_weight("model.layers.0.mamba.dt_bias")) {
        CHECK(std::log1p(std::exp(bias)) > 0.9e-3);
        CHECK(std::log1p(std::exp(bias)) < 0.11);
    }
    check_names(model, {{"tp", "2"}, {"ep", "4"}, {"cp", "2"}},
                {"backbone.embeddings.weight", "backbone.norm_f.weight", "backbone.layers.0.norm.weight",
                 "backbone.layers.0.mixer.in_proj.weight", "backbone.layers.0.mixer.conv1d.weight",
                 "backbone.layers.0.mixer.conv1d.bias", "backbone.layers.0.mixer.D",
                 "backbone.layers.0.mixer.norm.weight", "backbone.layers.1.mixer.gate.e_score_correction_bias",
                 "backbone.layers.1.mixer.experts.7.up_proj.weight", "backbone.layers.1.mixer.fc1_latent_proj.weight",
                 "backbone.layers.1.mixer.shared_experts.down_proj.weight", "backbone.layers.2.mixer.q_proj.weight",
                 "mtp.layers.0.eh_proj.weight", "mtp.layers.0.mixer.o_proj.weight", "mtp.layers.1.norm.weight",
                 "mtp.layers.1.mixer.experts.0.down_proj.weight", "mtp.layers.1.final_layernorm.weight"});
}

TEST_CASE("families with modules of their own: names of published files, and back under another plan") {
    struct Family {
        const char* model;
        Fields fields;
        std::vector<std::string> names;
    };
    const std::string at = "model.layers.2.", towers = "model.language_model.layers.2.";
    const std::vector<Family> families{
        {"granite4",
         {},
         {at + "mamba.in_proj.weight", at + "mamba.conv1d.bias", at + "mamba.A_log", at + "mamba.norm.weight",
          at + "block_sparse_moe.input_linear.weight", at + "block_sparse_moe.router.layer.weight",
          at + "shared_mlp.input_linear.weight", "model.layers.1.self_attn.q_proj.weight"}},
        {"granite4",
         {{"num_local_experts", "0"}},
         {at + "shared_mlp.input_linear.weight", at + "shared_mlp.output_linear.weight"}},
        {"gemma4",
         {},
         {at + "layer_scalar", at + "router.proj.weight", at + "router.scale", at + "router.per_expert_scale",
          at + "experts.gate_up_proj", at + "mlp.down_proj.weight", at + "pre_feedforward_layernorm_2.weight",
          at + "post_feedforward_layernorm.weight", "model.layers.1.self_attn.k_norm.weight"}},
        {"gemma4",
         {{"architectures", R"(["Gemma4ForConditionalGeneration"])"},
          {"text_config", R"({"model_type": "gemma4_text"})"},
          {"vision_config", R"({"depth": 2})"}},
         {towers + "experts.down_proj", towers + "layer_scalar", "model.language_model.embed_tokens.weight"}},
        {"llama4",
         {{"architectures", R"(["Llama4ForConditionalGeneration"])"},
          {"text_config", R"({"model_type": "llama4_text"})"},
          {"vision_config", R"({"depth": 2})"}},
         {"language_model.model.layers.0.self_attn.q_proj.weight", "language_model.lm_head.weight"}},
        {"qwen3",
         {{"architectures", R"(["Qwen3VLMoeForConditionalGeneration"])"},
          {"text_config", R"({"model_type": "qwen3_vl_moe_text"})"},
          {"vision_config", R"({"depth": 2})"}},
         {"model.language_model.layers.0.mlp.experts.7.down_proj.weight", "lm_head.weight"}},
        {"step",
         {},
         {at + "moe.gate.weight", at + "moe.router_bias", at + "moe.gate_proj.weight", at + "moe.down_proj.weight",
          at + "share_expert.up_proj.weight", at + "self_attn.g_proj.weight", "model.layers.0.mlp.up_proj.weight"}},
        {"phimoe",
         {},
         {at + "block_sparse_moe.gate.weight", at + "block_sparse_moe.experts.7.w2.weight",
          at + "self_attn.o_proj.bias", at + "input_layernorm.bias", "model.norm.bias", "lm_head.bias"}},
        {"erniebias", {}, {at + "mlp.shared_experts.down_proj.bias", "lm_head.bias"}}};
    for (const Family& family : families) {
        const auto model = small_model(family.model, family.fields);
        check_names(model,
                    model->kinds.back().moe ? Fields{{"tp", "2"}, {"ep", "4"}, {"cp", "2"}} : Fields{{"tp", "2"}},
                    family.names);
    }
}
