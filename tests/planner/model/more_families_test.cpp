// Families of 2025 and 2026 whose layers differ from each other: what is read of them, and their published numbers of
// parameters.
#include "planner/model/families/load_model.hpp"
#include "planner/model/model.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/planner/model/mixed_configs.hpp"
#include "tests/support/changed.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

using namespace moe;
using namespace moe::test;

namespace {

struct Published {
    const char* name;
    double total, active; // billions, as model cards say, MTP not counted; active: some cards leave out the embedding
    bool executable;
    std::string (*config)();
};

constexpr Published published[] = {
    {"Gemma-4-26B-A4B", 25.2, 3.8, true, gemma4},
    {"Granite-4.0-H-Small", 32.2, 9, true, granite_small},
    {"Hy3", 295, 21, true, hy3},
    {"K-EXAONE-236B-A23B", 236, 23, true, k_exaone},
    {"Laguna-S-2.1", 118, 8, true, laguna_s},
    {"MiMo-V2-Flash", 309, 15, true, mimo_flash},
    {"MiMo-V2.5-Pro", 1020, 42, true, mimo_pro},
    {"Mistral-Small-4", 119, 6.5, true, mistral_small4},
    {"Solar-Open-100B", 102.6, 12, true, solar_open},
    {"Step-3.5-Flash", 196, 11, true, step_flash},
    {"Trinity-Large", 400, 13, true, trinity_large},
    {"Trinity-Mini", 26, 3, true, trinity_mini},
};

model::Model read(const std::string& config) { return families::model_from_json(config, "config.json"); }

std::string with(const std::string& config, const std::string& more) { return changed(config, more); }

} // namespace

TEST_CASE("published configs of mixed layers: as many parameters as the model cards say") {
    for (const Published& p : published) {
        CAPTURE(std::string(p.name));
        const model::Model model = read(p.config());
        const model::ParameterCount count = model::count_parameters(model);
        CHECK(static_cast<double>(count.total_no_mtp) / 1e9 == nearly(p.total).epsilon(0.005));
        const double all = static_cast<double>(count.active) / 1e9,
                     rest = static_cast<double>(count.active_no_embed) / 1e9;
        CHECK(std::min(std::abs(all - p.active), std::abs(rest - p.active)) <= 0.5); // whole billions are published
        CHECK(model.not_executable.empty() == p.executable);
        const std::vector<std::string> unread = families::unread_fields(model);
        CHECK_MESSAGE(unread.empty(), (unread.empty() ? "" : unread.front()));
    }
}

TEST_CASE("MiMo-V2.5-Pro: every weight of the published files, which list 1,023,244,718,976 with the scales of FP8") {
    const std::int64_t scales =
        73 * 216 * 48 + 4 * 3 * 48 * 128 + std::int64_t{69} * 384 * 3 * 48 * 16; // attention, MLPs, experts
    CHECK(model::count_parameters(read(mimo_pro())).total == 1'023'244'718'976 - scales);
}

TEST_CASE("MiMo-V2: layers of windows have key/value heads and sinks of their own") {
    const model::Model model = read(mimo_pro());
    CHECK(model.kind_of(0).attention.window == 0);
    CHECK_FALSE(model.kind_of(0).attention.sinks);
    CHECK(model.kind_of(0).dense_ffn == 16384);
    CHECK(model.kind_of(1).attention.window == 128);
    CHECK(model.kind_of(1).attention.sinks);
    CHECK(model.kind_of(1).attention.rope_dim == 64);
    CHECK(model.kind_of(7).attention.window == 0);
    CHECK(model.kind_of(69).attention.window == 0);
    REQUIRE(model.mtp.size() == 3);
    const model::LayerKind& depth = model.kinds[static_cast<std::size_t>(model.mtp[0])];
    CHECK(depth.attention == model.kind_of(1).attention);
    CHECK(depth.dense_ffn == 16384);
    const model::Model flash = read(mimo_flash());
    CHECK(flash.kind_of(0).attention.kv_heads == 4);
    CHECK(flash.kind_of(1).attention.kv_heads == 8);
    // The file is as transformers 5 saves it: types of layers, and no field for the windows' heads.
    const model::Model saved =
        read(R"({"architectures": ["MiMoV2FlashForCausalLM"], "head_dim": 192, "hidden_size": 4096,
        "intermediate_size": 16384, "layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense",
        "sparse"], "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_attention_heads": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 2, "num_key_value_heads": 4, "sliding_window": 128, "v_head_dim":
        128, "vocab_size": 152576})");
    CHECK(saved.kind_of(0) == flash.kind_of(0));
    CHECK(saved.kind_of(1) == flash.kind_of(1));
}

TEST_CASE("Step-3.5, Laguna: query heads by layer, a gate for each") {
    const model::Model step = read(step_flash());
    CHECK(step.kind_of(0).attention.heads == 64);
    CHECK(step.kind_of(0).attention.rope_dim == 64);
    CHECK(step.kind_of(1).attention.heads == 96);
    CHECK(step.kind_of(1).attention.rope_dim == 128);
    CHECK(step.kind_of(1).attention.window == 512);
    CHECK(step.kind_of(1).attention.head_gate);
    CHECK_FALSE(step.kind_of(2).moe.has_value());
    CHECK_FALSE(read(with(step_flash(), R"("moe_layers_enum": "4, 5 ")")).kind_of(3).moe.has_value());
    CHECK(read(with(step_flash(), R"("moe_layers_enum": [2, 5])")).kind_of(2).moe.has_value());
    CHECK(step.kind_of(3).moe->router.scale == 3.0);
    CHECK(step.norms_from_one);
    CHECK(step.kind_of(0).attention.rope->theta == 5e6);
    CHECK(step.kind_of(1).attention.rope->theta == 1e4);
    // Bounds of the last two layers, padded over the depths of MTP; a scaling of the layers that see everything.
    const model::Model bound =
        read(with(step_flash(), R"("swiglu_limits": )" + list(48, 43, 100, "7.0", "0.0") +
                                    R"(, "swiglu_limits_shared": )" + list(48, 44, 100, "16.0", "0.0") +
                                    R"(, "rope_scaling": {"rope_type": "llama3", "factor": 2.0,
        "low_freq_factor": 1.0, "high_freq_factor": 32.0, "original_max_position_embeddings": 131072})"));
    CHECK(bound.kind_of(43).swiglu_limit == 7.0);
    CHECK(bound.kind_of(43).limit_behind);
    CHECK(bound.kind_of(43).shared_limit == 0.0);
    CHECK(bound.kind_of(44).shared_limit == 16.0);
    CHECK(bound.kind_of(42).swiglu_limit == 0.0);
    CHECK(bound.kind_of(0).attention.rope->scaling.type == "llama3");
    CHECK(bound.kind_of(1).attention.rope->scaling.type.empty());
    CHECK(fault_of([&] {
              read(with(step_flash(), R"("swiglu_limits": [7.0])"));
          }).find("must have an entry for each of the 45 layers") != std::string::npos);
    REQUIRE(step.mtp.size() == 3);
    CHECK(step.kinds[static_cast<std::size_t>(step.mtp[2])].attention == step.kind_of(1).attention);
    CHECK(step.kinds[static_cast<std::size_t>(step.mtp[2])].dense_ffn == 11264);
    const model::Model laguna = read(laguna_s());
    CHECK(laguna.kind_of(0).attention.heads == 48);
    CHECK(laguna.kind_of(0).attention.rope_dim == 64);
    CHECK(laguna.kind_of(47).attention.heads == 72);
    CHECK(laguna.kind_of(47).attention.head_gate);
    CHECK(read(with(laguna_s(), R"("gating": "per-element")")).kind_of(47).attention.output_gate);
    // Transformers and the words of the published file mean different things by false.
    CHECK(fault_of([&] {
              read(with(laguna_s(), R"("gating": false)"));
          }).find("gating = false: must be true, per-head or per-element") != std::string::npos);
    const model::Model older = read(with(laguna_s(), R"("mlp_layer_types": null, "mlp_only_layers": [0, 1])"));
    CHECK_FALSE(older.kind_of(1).moe.has_value());
    CHECK(older.kind_of(2).moe.has_value());
    // A vision-language model around it.
    const std::string config = step_flash();
    const model::Model wrapped =
        read(R"({"architectures": ["Step3p7ForConditionalGeneration"], "text_config": {"model_type":
        "step3p5", )" +
             config.substr(config.find("\"att_impl_type\"")) + R"(, "vision_config": {"depth": 2}})");
    CHECK(wrapped.kinds == step.kinds);
    CHECK(wrapped.layers == step.layers);
}

TEST_CASE("AFMoE, EXAONE-MoE: layers that see everything turn nothing") {
    const model::Model trinity = read(trinity_large());
    CHECK(trinity.post_norms);
    CHECK(trinity.kind_of(0).attention.window == 4096);
    CHECK(trinity.kind_of(0).attention.rope_dim == 128);
    CHECK(trinity.kind_of(3).attention.window == 0);
    CHECK(trinity.kind_of(3).attention.rope_dim == 0);
    CHECK(trinity.kind_of(3).attention.output_gate);
    CHECK_FALSE(trinity.kind_of(5).moe.has_value());
    CHECK(trinity.kind_of(6).moe->router.scoring == model::Scoring::sigmoid);
    const model::Model exaone = read(k_exaone());
    CHECK(exaone.kind_of(47).attention.rope_dim == 0);
    CHECK(exaone.kind_of(46).attention.window == 128);
    CHECK_FALSE(exaone.kind_of(0).moe.has_value());
    // The later form of the same config says the same.
    const auto later = [](const std::string& rest) {
        return read(
            R"({"architectures": ["ExaoneMoeForCausalLM"], "head_dim": 128, "hidden_size": 6144, "intermediate_size":
            18432, "moe_intermediate_size": 2048, "num_attention_heads": 64, "num_experts": 128, "num_experts_per_tok": 8,
            "num_hidden_layers": 48, "num_key_value_heads": 8, "sliding_window": 128, "vocab_size": 153600, )" +
            rest + "}");
    };
    for (const char* pattern : {R"("sliding_window_pattern": "LLLG")", R"("sliding_window_pattern": 4)"}) {
        const model::Model same = later(pattern);
        CHECK(same.kinds == exaone.kinds);
        CHECK(same.layers == exaone.layers);
    }
}

TEST_CASE("Granite 4: every layer has a mixer, and experts or the shared MLP alone") {
    const model::Model small = read(granite_small());
    CHECK(small.kind_of(0).attention.kind == model::AttentionKind::mamba);
    CHECK(small.kind_of(0).moe->shared_ffn == 1536);
    CHECK(small.kind_of(5).attention.kind == model::AttentionKind::gqa);
    CHECK(small.kind_of(5).attention.rope_dim == 0);
    CHECK(small.kind_of(5).moe->router.softmax_after_top_k);
    const model::Model dense =
        read(with(granite_small(), R"("num_local_experts": 0, "position_embedding_type": "rope")"));
    CHECK_FALSE(dense.kind_of(0).moe.has_value());
    CHECK(dense.kind_of(0).dense_ffn == 1536);
    CHECK(dense.kind_of(5).attention.rope_dim == 128);
}

TEST_CASE("Gemma 4: keys serve as values where all is seen, the MLP beside the experts is no expert of theirs") {
    const model::Model model = read(gemma4());
    CHECK(model.kind_of(0).attention.window == 1024);
    CHECK(model.kind_of(0).attention.rope_dim == 256);
    CHECK_FALSE(model.kind_of(0).attention.k_eq_v);
    CHECK(model.kind_of(5).attention.k_eq_v);
    CHECK(model.kind_of(5).attention.kv_heads == 2);
    CHECK(model.kind_of(5).attention.v_dim == 512);
    // All columns belong to pairs, of which a quarter turns, as slowly as if all did.
    CHECK(model.kind_of(5).attention.rope_dim == 512);
    CHECK(model.kind_of(5).attention.rope->scaling.type == "proportional");
    CHECK(model.kind_of(5).attention.rope->scaling.share == 0.25);
    CHECK(model.kind_of(5).attention.rope->theta == 1e6);
    CHECK(model.kind_of(0).attention.rope->theta == 1e4);
    CHECK(model.kind_of(0).attention.value_norm);
    CHECK(model.kind_of(0).attention.scale == 1.0);
    CHECK(model.kind_of(0).output_scale);
    CHECK(model.logit_cap == 30.0);
    CHECK(model.embedding_scale == nearly(std::sqrt(2816.0)));
    CHECK(model.kind_of(5).moe->shared_ffn == 2112);
    CHECK(model.kind_of(5).moe->branch_norms);
    CHECK(model.kind_of(5).activation == model::Activation::gelu_tanh);
    CHECK(model.tied_embeddings);
    CHECK(model.left_out == std::vector<std::string>{"vision_config"});
    const std::string small = R"({"architectures": ["Gemma4ForCausalLM"], "global_head_dim": 512, "head_dim": 256,
        "hidden_size": 1536, "intermediate_size": 6144, "layer_types": ["sliding_attention", "full_attention"],
        "num_attention_heads": 8, "num_hidden_layers": 2, "num_key_value_heads": 1, "sliding_window": 512, "vocab_size":
        262144, "hidden_size_per_layer_input": 0})";
    CHECK_FALSE(read(small).kind_of(1).moe.has_value());
    CHECK_FALSE(read(small).kind_of(1).attention.k_eq_v);
    for (const char* field : {R"("hidden_size_per_layer_input": 256)", R"("num_kv_shared_layers": 20)"})
        CHECK(fault_of([&] { read(with(small, field)); }).find("are not supported") != std::string::npos);
}

TEST_CASE("Mistral 4: latent attention and a softmax over all experts") {
    const model::Model model = read(mistral_small4());
    CHECK(model.kind_of(0).attention.kind == model::AttentionKind::mla);
    CHECK(model.kind_of(0).attention.kv_lora == 256);
    CHECK(model.kind_of(0).moe->router.scoring == model::Scoring::softmax);
    CHECK(model.kind_of(0).moe->router.normalize);
    CHECK_FALSE(model.kind_of(0).moe->router.expert_bias);
}

TEST_CASE("mixed layers: what contradicts itself, or is not known, is refused by field") {
    const auto refused = [](const std::string& config, const std::string& more, const std::string& words) {
        const std::string line = fault_of([&] { read(with(config, more)); });
        CAPTURE(line);
        CHECK(line.find(words) != std::string::npos);
    };
    refused(mimo_flash(), R"("hybrid_layer_pattern": [0, 1])", "must have num_hidden_layers = 48 entries, found 2");
    refused(mimo_flash(), R"("scoring_func": "softmax")", "scoring_func = \"softmax\": only sigmoid is known");
    refused(mimo_flash(), R"("swa_num_key_value_heads": 7)", "num_key_value_heads");
    refused(step_flash(), R"("layer_types": ["full_attention"])", "must have an entry for each of the 45 layers");
    refused(step_flash(), R"("moe_layers_enum": "3,45")", "must list indices below num_hidden_layers = 45");
    refused(step_flash(), R"("moe_layers_enum": "3;4")", "must list indices");
    refused(step_flash(), R"("moe_layers_enum": null)", "moe_layers_enum");
    refused(step_flash(), R"("att_impl_type": "MLA")", "only GQA is known");
    refused(k_exaone(), R"("is_moe_layer": [true])", "is_moe_layer");
    refused(k_exaone(), R"("is_moe_layer": [1, 2])", "must be an array of true and false");
    refused(k_exaone(), R"("layer_types": null, "sliding_window_pattern": "LXG")", "sliding_window_pattern");
    refused(trinity_mini(), R"("score_func": "softmax")", "only sigmoid is known");
    refused(laguna_s(), R"("gating": "per-token")", "gating");
    refused(laguna_s(), R"("moe_apply_router_weight_on_input": true)", "only false is known");
    refused(laguna_s(), R"("num_attention_heads_per_layer": [48])",
            "must have num_hidden_layers = 48 entries, found 1");
    refused(hy3(), R"("moe_router_use_sigmoid": false)", "only true is known");
    refused(granite_small(), R"("mamba_n_heads": 100)", "mamba_n_heads = 100: must divide mamba_expand * hidden_size");
    refused(granite_small(), R"("mamba_d_head": 32)", "mamba_d_head = 32: times mamba_n_heads");
    refused(granite_small(), R"("mamba_proj_bias": true)", "only projections without a bias");
    const std::string other = list(40, 5, 10, "\"attention\"", "\"convolution\"");
    refused(granite_small(), "\"layer_types\": " + other, "\"convolution\" is not known of GraniteMoeHybrid");
}
