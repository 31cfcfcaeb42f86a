// Families whose classes are published beside their weights, and fields that no reader has a use for.
#include "planner/model/families/load_model.hpp"
#include "planner/model/model.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/support/changed.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

using namespace moe;

namespace {

constexpr const char* longcat = R"({"architectures": ["LongcatFlashForCausalLM"], "hidden_size": 6144, "num_layers": 28,
    "num_attention_heads": 64, "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048, "n_routed_experts": 512,
    "zero_expert_num": 256, "zero_expert_type": "identity", "moe_topk": 12, "routed_scaling_factor": 6.0,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "vocab_size": 131072, "rope_theta": 10000000.0})";

constexpr const char* ernie_vl = R"({"architectures": ["Ernie4_5_VLMoeForConditionalGeneration"], "hidden_size": 2560,
    "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": 4, "intermediate_size": 12288,
    "vocab_size": 103424, "moe_num_experts": [64, 64], "moe_k": 6, "moe_intermediate_size": [1536, 512],
    "moe_num_shared_experts": 2, "moe_layer_start_index": [1, 1], "moe_layer_end_index": [29, 28],
    "vision_config": {"hidden_size": 1280}})";

constexpr const char* deepseek_ocr = R"({"architectures": ["DeepseekOCRForCausalLM"], "model_type": "deepseek_vl_v2",
    "language_config": {"architectures": ["DeepseekV2ForCausalLM"], "use_mla": false, "hidden_size": 1280,
      "num_hidden_layers": 12, "num_attention_heads": 10, "num_key_value_heads": 10, "intermediate_size": 6848,
      "moe_intermediate_size": 896, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
      "first_k_dense_replace": 1, "q_lora_rank": null, "kv_lora_rank": null, "qk_nope_head_dim": 0,
      "qk_rope_head_dim": 0, "v_head_dim": 0, "topk_method": "greedy", "vocab_size": 129280}})";

constexpr const char* ling3 = R"({"architectures": ["BailingMoeV3ForCausalLM"], "hidden_size": 1536,
    "intermediate_size": 4608, "num_hidden_layers": 24, "num_attention_heads": 16, "head_dim": 128,
    "vocab_size": 157184, "layer_group_size": 4, "short_conv_kernel_size": 4, "no_kda_lora": true,
    "q_lora_rank": 256, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "num_experts": 128, "num_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "moe_intermediate_size": 512, "first_k_dense_replace": 1, "score_function": "sigmoid"})";

struct Published {
    const char* name;
    double total, active; // billions, as model cards and reports say, MTP not counted; active 0: not said
    std::string config;
};

const std::vector<Published> published{
    {"Arctic", 480, 17, R"({"architectures": ["ArcticForCausalLM"], "hidden_size": 7168, "intermediate_size": 4864,
        "num_hidden_layers": 35, "num_attention_heads": 56, "num_key_value_heads": 8, "num_local_experts": 128,
        "num_experts_per_tok": 2, "moe_layer_frequency": 1, "use_residual": true, "vocab_size": 32000})"},
    {"Aria", 24.9, 3.5, R"({"architectures": ["AriaForConditionalGeneration"], "text_config": {"hidden_size": 2560,
        "intermediate_size": 13568, "moe_intermediate_size": 1664, "moe_num_experts": 64, "moe_num_shared_experts": 2,
        "moe_topk": 6, "num_attention_heads": 20, "num_key_value_heads": 20, "num_hidden_layers": 28,
        "vocab_size": 100352}})"},
    {"Grok-2", 269.5, 115, R"({"architectures": ["Grok1ForCausalLM"], "hidden_size": 8192, "intermediate_size": 32768,
        "moe_intermediate_size": 16384, "num_experts_per_tok": 2, "num_local_experts": 8, "residual_moe": true,
        "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 64, "head_dim": 128,
        "vocab_size": 131072, "final_logit_softcapping": 50, "sliding_window_size": -1, "global_attn_every_n": 1})"},
    {"LongCat-Flash", 560, 27, longcat},
    {"MiniMax-Text-01", 456, 45.9, R"({"architectures": ["MiniMaxText01ForCausalLM"],
        "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0,
        1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0,
        0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1], "head_dim": 128, "hidden_size": 6144, "intermediate_size": 9216,
        "num_attention_heads": 64, "num_experts_per_tok": 2, "num_hidden_layers": 80, "num_key_value_heads": 8,
        "num_local_experts": 32, "rotary_dim": 64, "vocab_size": 200064})"},
    {"Ling-3.0-tiny", 7.9, 0, ling3},
    {"openPangu-Ultra-MoE", 718, 39, R"({"architectures": ["PanguUltraMoEForCausalLM"], "attention_kv_lora_dim": 512,
        "attention_q_lora_dim": 1536, "attention_qk_dim": 128, "attention_qk_rope_dim": 64, "attention_v_dim": 128,
        "hidden_size": 7680, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_attention_heads": 128,
        "num_dense_layers": 3, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_mtp_layers": 1,
        "num_routed_experts": 256, "num_shared_experts": 1, "sandwich_norm": true, "vocab_size": 153600})"},
    {"Pangu-Pro-MoE", 72, 16.5, R"({"architectures": ["PanguProMoEForCausalLM"], "hidden_size": 5120,
        "moe_intermediate_size": 1344, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
        "num_experts": 64, "num_experts_per_tok": 8, "shared_expert_intermediate_size": 5376, "vocab_size": 153376})"},
    {"Ring-mini-linear-2.0", 16.4, 1.6, R"({"architectures": ["BailingMoeLinearV2ForCausalLM"], "hidden_size": 2048,
        "intermediate_size": 5120, "moe_intermediate_size": 512, "num_hidden_layers": 20, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 256, "num_experts_per_tok": 8,
        "num_shared_experts": 1, "n_group": 8, "topk_group": 4, "layer_group_size": 5, "first_k_dense_replace": 1,
        "use_qk_norm": true, "vocab_size": 157184})"},
    {"Sarvam-30B", 32, 2.4, R"({"architectures": ["SarvamMoEForCausalLM"], "hidden_size": 4096,
        "intermediate_size": 8192, "moe_intermediate_size": 1024, "num_hidden_layers": 19, "num_attention_heads": 64,
        "num_key_value_heads": 4, "head_dim": 64, "num_experts": 128, "num_experts_per_tok": 6,
        "num_shared_experts": 1, "first_k_dense_replace": 1, "vocab_size": 262144})"},
    {"Skywork-MoE", 146, 22, R"({"architectures": ["SkyworkForCausalLM"], "hidden_size": 4608, "num_hidden_layers": 52,
        "num_attention_heads": 36, "num_key_value_heads": 36, "intermediate_size": 12288, "num_experts": [16],
        "num_experts_per_tok": 2, "vocab_size": 65532})"},
    {"SmallThinker-21BA3B", 21.5, 3, R"({"architectures": ["SmallThinkerForCausalLM"], "head_dim": 128,
        "hidden_size": 2560, "moe_ffn_hidden_size": 768, "moe_num_active_primary_experts": 6,
        "moe_num_primary_experts": 64, "num_attention_heads": 28, "num_hidden_layers": 52, "num_key_value_heads": 4,
        "vocab_size": 151936})"},
    {"XVERSE-MoE-A4.2B", 25.8, 4.2, R"({"architectures": ["XverseForCausalLM"], "hidden_size": 2560,
        "intermediate_size": 1728, "num_hidden_layers": 28, "num_attention_heads": 32, "num_experts": 64,
        "moe_top_k": 6, "num_shared_experts": 2, "vocab_size": 100534})"},
};

model::Model read(const std::string& config) { return families::model_from_json(config, "config.json"); }

std::string fault(const std::string& config) {
    return fault_of([&] { read(config); });
}

std::string profile(const std::string& name) { return families::load_model(name).config_json; }

using Names = std::vector<std::string>;

} // namespace

TEST_CASE("families of published code: as many parameters as their cards say, priced and not executed") {
    for (const Published& p : published) {
        CAPTURE(std::string(p.name));
        const model::Model model = read(p.config);
        const model::ParameterCount count = model::count_parameters(model);
        CHECK(static_cast<double>(count.total_no_mtp) / 1e9 == nearly(p.total).epsilon(0.01));
        // Rounded, or an average; some cards leave out one embedding or both.
        const auto all = static_cast<double>(count.active), table = static_cast<double>(model.vocab * model.hidden);
        double nearest = 1.0;
        for (const double active : {all, all - table, all - 2.0 * table})
            nearest = std::min(nearest, std::abs(active / 1e9 - p.active) / p.active);
        CHECK((p.active == 0.0 || nearest <= 0.06));
        CHECK_FALSE(model.not_executable.empty());
        CHECK(families::unread_fields(model).empty());
    }
}

TEST_CASE("LongCat-Flash: a layer counts as two, of whose experts those with weights are expected") {
    const model::Model model = read(longcat);
    REQUIRE(model.layers.size() == 56);
    const model::LayerKind &first = model.kind_of(0), &second = model.kind_of(1);
    REQUIRE(first.moe);
    CHECK(first.moe->top_k == 8);
    CHECK(first.moe->shared_ffn == 12288);
    CHECK(second.dense_ffn == 12288);
    CHECK(first.attention.kind == model::AttentionKind::mla);
    CHECK(read(changed(longcat, R"("zero_expert_num": 0)")).kind_of(0).moe->top_k == 12);
    CHECK(fault(changed(longcat, R"("zero_expert_type": "copy")")) ==
          "2: config.json: zero_expert_type = \"copy\": only identity is known");
}

TEST_CASE("Ling 3, Ling-linear, MiniMax-01: which layers are linear attention") {
    const model::Model ling = read(ling3);
    for (int layer = 0; layer < 24; ++layer)
        CHECK(ling.kind_of(layer).attention.kind ==
              (layer % 4 == 3 ? model::AttentionKind::mla : model::AttentionKind::opaque));
    CHECK(ling.kind_of(0).dense_ffn == 4608);
    CHECK(ling.kind_of(1).moe->experts == 128);
    // Queries, keys, values, output, decay and gate of 1536 x 2048 each, or the latter two by latents of 128 columns.
    const std::int64_t hidden = 1536, inner = 2048, rest = hidden * 16 + 3 * 4 * inner + 16 + inner + 128;
    CHECK(ling.kind_of(0).attention.opaque.weights == 6 * hidden * inner + rest);
    CHECK(read(changed(ling3, R"("no_kda_lora": false)")).kind_of(0).attention.opaque.weights ==
          4 * hidden * inner + 2 * 128 * (hidden + inner) + rest);
    // Layers behind the last whole group see everything, but for Ling 3.
    const std::string shorter = changed(ling3, R"("num_hidden_layers": 22)");
    CHECK(read(shorter).kind_of(20).attention.kind == model::AttentionKind::opaque);
    const model::Model second = read(changed(shorter, R"("architectures": ["BailingMoeV2_5ForCausalLM"])"));
    CHECK(second.kind_of(20).attention.kind == model::AttentionKind::mla);
    CHECK(second.kind_of(18).attention.opaque.name == std::string("lightning attention"));
    CHECK(read(changed(ling3, R"("linear_num_heads": 8, "linear_head_dim": 64)")).kind_of(0).attention.opaque.out ==
          512);
}

TEST_CASE("models that see: experts of images are left out, the text's reader goes by its own name") {
    const model::Model ernie = read(ernie_vl);
    CHECK(ernie.left_out == Names{"vision_config", "moe_num_experts of images", "moe_intermediate_size of images"});
    CHECK(ernie.kind_of(1).moe->ffn == 1536);
    CHECK_FALSE(ernie.kind_of(0).moe);
    CHECK(ernie.not_executable.starts_with("moe_intermediate_size: experts of images"));
    const model::Model ocr = read(deepseek_ocr);
    CHECK(ocr.kind_of(1).attention.kind == model::AttentionKind::gqa);
    CHECK(ocr.kind_of(1).attention.qk_dim == 128);
    CHECK(ocr.kind_of(1).moe->experts == 64);
    CHECK(static_cast<double>(model::count_parameters(ocr).active_no_embed) / 1e9 == nearly(0.57).epsilon(0.02));
}

TEST_CASE("dense models: norms on both sides, layers that turn nothing, windows, a plain MLP") {
    const std::string sizes = R"("hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 100)";
    const auto named = [&](const std::string& name, const std::string& more = "") {
        return "{\"architectures\": [\"" + name + "\"], " + sizes + (more.empty() ? "" : ", " + more) + "}";
    };
    const model::Model gemma = read(named("Gemma3ForCausalLM", R"("sliding_window_pattern": 2, "sliding_window": 8)"));
    CHECK((gemma.post_norms && gemma.norms_from_one && gemma.tied_embeddings));
    CHECK(gemma.kind_of(0).attention.window == 8);
    CHECK(gemma.kind_of(1).attention.window == 0);
    CHECK(gemma.kind_of(0).attention.rope->theta == 10000.0);
    CHECK(gemma.kind_of(1).attention.scale == 1.0 / 16.0);
    CHECK(gemma.not_executable.empty());
    CHECK(read(named("Gemma2ForCausalLM")).not_executable.starts_with("attn_logit_softcapping"));
    const model::Model smol = read(named("SmolLM3ForCausalLM"));
    CHECK(smol.kind_of(2).attention.rope_dim == 16);
    CHECK(smol.kind_of(3).attention.rope_dim == 0);
    const model::Model exaone = read(named("Exaone4ForCausalLM"));
    CHECK(exaone.kind_of(0).attention.window == 4096);
    CHECK(exaone.kind_of(3).attention.rope_dim == 0);
    CHECK(read(named("Exaone4ForCausalLM", R"("sliding_window": null)")).kind_of(0).attention.rope_dim == 16);
    CHECK_FALSE(read(named("ArceeForCausalLM")).kind_of(0).gated);
    CHECK(read(named("SeedOssForCausalLM")).kind_of(0).attention.qkv_bias);
    CHECK_FALSE(read(named("SeedOssForCausalLM")).kind_of(0).attention.out_bias);
    const std::string beta = R"("rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
        "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1})";
    CHECK(read(named("Ministral3ForCausalLM", beta)).kind_of(0).attention.query_scale ==
          model::QueryScale{0.1, 32.0, 0.0});
    const std::string plain = R"("rope_parameters": {"rope_theta": 500.0, "original_max_position_embeddings": 16,
        "llama_4_scaling_beta": 0.1})";
    CHECK(read(named("Ministral3ForCausalLM", plain)).kind_of(0).attention.query_scale ==
          model::QueryScale{0.1, 16.0, 0.0});
    for (const char* scaled : {"Ministral3ForCausalLM", "CwmForCausalLM"}) // whose classes scale what says nothing
        CHECK(fault(named(scaled)) == "2: config.json: field \"rope_parameters\" is missing: no other field gives it");
    const model::Model bamba =
        read(named("BambaForCausalLM", R"("mamba_n_heads": 8, "mamba_d_state": 32, "attn_layer_indices": [2])"));
    CHECK(bamba.kind_of(1).attention.kind == model::AttentionKind::mamba);
    CHECK(bamba.kind_of(2).attention.rope_dim == 8);
    CHECK(bamba.kind_of(1).dense_ffn == 96);
    CHECK(bamba.not_executable.empty());
    CHECK(fault(named("GraniteForCausalLM", R"("num_experts": 8)")) ==
          "2: config.json: num_experts = 8: GraniteForCausalLM has no experts: name the architecture that has");
}

TEST_CASE("fields that nothing was read from are named, unless they say nothing or what is so anyway") {
    const std::string qwen = profile("Qwen3-30B-A3B");
    const auto unread = [](const std::string& config) { return families::unread_fields(read(config)); };
    CHECK(unread(qwen).empty());
    CHECK(unread(changed(qwen, R"("zero_expert_num": 64, "attn_logit_softcapping": 30.0)")) ==
          Names{"zero_expert_num", "attn_logit_softcapping"});
    CHECK(unread(changed(qwen, R"("residual_moe": false, "engram_size": 0, "lists": [], "clip": null)")).empty());
    CHECK(unread(changed(qwen, R"("eos_token_id": 5, "router_aux_loss_coef": 0.1, "transformers_version": "9")"))
              .empty());
    // Qwen3-MoE has a softmax over all experts: another word is not passed over.
    CHECK(unread(changed(qwen, R"("scoring_func": "softmax")")).empty());
    CHECK(unread(changed(qwen, R"("scoring_func": "sigmoid")")) == Names{"scoring_func"});
    CHECK(unread(changed(qwen, R"("scoring_func": 3)")) == Names{"scoring_func"});
    // Within objects that are read, by both names.
    const std::string rope = R"("rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 5.0,
        "original_max_position_embeddings": 32, "ntk_alpha": 8.0})";
    CHECK(unread(changed(qwen, rope)) == Names{"rope_parameters.ntk_alpha"});
    // Beside the text of a model that sees, the fields of towers stand; within it, every field counts.
    const std::string text = changed(qwen, R"("model_type": "qwen3_moe", "hyper_gates": 4)");
    CHECK(unread(R"({"architectures": ["SeerModel"], "downsample_ratio": 0.5, "vision_config": {}, "text_config": )" +
                 text + "}") == Names{"hyper_gates"});
}

TEST_CASE("fields that nothing was read from: no profile of ours has one") {
    for (const char* name : {"DeepSeek-V2-Lite", "DeepSeek-V4-Flash", "GPT-OSS-120B", "K-EXAONE-236B-A23B",
                             "Kimi-Linear-48B-A3B", "Llama4-Scout", "MiniMax-M2", "Mixtral-8x7B", "Qwen2-57B-A14B",
                             "Qwen3-Next-80B-A3B", "Granite-3.1-3B-A800M", "Nemotron-3-Nano"}) {
        CAPTURE(std::string(name));
        CHECK(families::unread_fields(families::load_model(name)).empty());
    }
}
