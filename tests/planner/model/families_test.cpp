// Families beside those that have profiles: their config.json as published, less what no reader looks at, against the
// published numbers of parameters.
#include "planner/model/families/load_model.hpp"
#include "planner/model/model.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <string>

namespace {

struct Published {
    const char* name;
    double total, active; // billions of parameters, as model cards say; MTP not counted
    bool executable;
    const char* config;
};

constexpr Published published[] = {
    {"DBRX", 131.6, 36.5, true,
     R"({"architectures": ["DbrxForCausalLM"], "attn_config": {"kv_n_heads": 8, "clip_qkv": 8}, "d_model": 6144,
     "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4}, "n_heads": 48, "n_layers":
     40, "tie_word_embeddings": false, "vocab_size": 100352})"},
    {"DeepSeekMoE-16B", 16.4, 2.8, true,
     R"({"architectures": ["DeepseekForCausalLM"], "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size":
     10944, "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2,
     "norm_topk_prob": false, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 28,
     "num_key_value_heads": 16, "scoring_func": "softmax", "vocab_size": 102400})"},
    {"ERNIE-4.5-21B-A3B", 21.8, 3.3, true,
     R"({"architectures": ["Ernie4_5_MoeForCausalLM"], "hidden_size": 2560, "intermediate_size": 12288,
     "num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4, "vocab_size": 103424,
     "tie_word_embeddings": true, "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
     "moe_layer_end_index": 28, "moe_layer_interval": 1, "moe_k": 6, "moe_intermediate_size": 1536})"},
    {"ERNIE-4.5-300B-A47B", 300, 47, true,
     R"({"architectures": ["Ernie4_5_MoeForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672,
     "num_attention_heads": 64, "num_hidden_layers": 54, "num_key_value_heads": 8, "vocab_size": 103424,
     "tie_word_embeddings": false, "moe_num_experts": 64, "moe_num_shared_experts": 0, "moe_layer_start_index": 3,
     "moe_layer_end_index": 53, "moe_k": 8, "moe_intermediate_size": 3584})"},
    {"Granite-3.1-3B-A800M", 3.3, 0.88, true,
     R"({"architectures": ["GraniteMoeForCausalLM"], "attention_bias": false, "hidden_size": 1536,
     "intermediate_size": 512, "logits_scaling": 6.0, "num_attention_heads": 24, "num_experts_per_tok": 8,
     "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 40, "tie_word_embeddings": true,
     "vocab_size": 49155})"},
    {"Grok-1", 314, 84, false,
     R"({"architectures": ["Grok1ModelForCausalLM"], "hidden_size": 6144, "intermediate_size": 32768,
     "num_attention_heads": 48, "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 64,
     "num_key_value_heads": 8, "vocab_size": 131072})"},
    {"Hunyuan-A13B", 80.4, 13, true,
     R"({"architectures": ["HunYuanMoEV1ForCausalLM"], "attention_bias": false, "head_dim": 128, "hidden_size":
     4096, "intermediate_size": 3072, "moe_intermediate_size": 3072, "moe_topk": 8, "num_attention_heads": 32,
     "num_experts": 64, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_shared_expert": 1,
     "tie_word_embeddings": true, "use_qk_norm": true, "vocab_size": 128167})"},
    {"Ling-mini-2.0", 16.26, 1.43, true,
     R"({"architectures": ["BailingMoeV2ForCausalLM"], "first_k_dense_replace": 1, "head_dim": 128, "hidden_size":
     2048, "intermediate_size": 5120, "moe_intermediate_size": 512, "n_group": 8, "topk_group": 4, "num_experts":
     256, "num_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 16, "num_experts_per_tok": 8,
     "num_hidden_layers": 20, "num_key_value_heads": 4, "partial_rotary_factor": 0.5, "routed_scaling_factor":
     2.5, "score_function": "sigmoid", "moe_router_enable_expert_bias": true, "use_qk_norm": true,
     "tie_word_embeddings": false, "vocab_size": 157184})"},
    {"Ling-1T", 1000, 51, true,
     R"({"architectures": ["BailingMoeV2ForCausalLM"], "first_k_dense_replace": 4, "head_dim": 128, "hidden_size": 8192,
     "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4, "num_experts": 256,
     "num_shared_experts": 1, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 80,
     "num_key_value_heads": 8, "partial_rotary_factor": 0.5, "routed_scaling_factor": 2.5, "score_function": "sigmoid",
     "moe_router_enable_expert_bias": true, "use_qk_norm": true, "vocab_size": 157184})"},
    {"MiniMax-M2", 228.7, 10.8, true,
     R"({"architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 128, "hidden_size": 3072, "intermediate_size": 1536,
     "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8,
     "num_local_experts": 256, "rotary_dim": 64, "scoring_func": "sigmoid", "tie_word_embeddings": false,
     "use_qk_norm": true, "vocab_size": 200064})"},
    {"Mistral-7B", 7.242, 7.242, true,
     R"({"architectures": ["MistralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
     "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "sliding_window": 4096,
     "tie_word_embeddings": false, "vocab_size": 32000})"},
    {"OLMoE-1B-7B", 6.92, 1.28, true,
     R"({"architectures": ["OlmoeForCausalLM"], "attention_bias": false, "hidden_size": 2048, "intermediate_size":
     1024, "norm_topk_prob": false, "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8,
     "num_hidden_layers": 16, "num_key_value_heads": 16, "tie_word_embeddings": false, "vocab_size": 50304})"},
    {"Phi-3.5-MoE", 41.9, 6.6, true,
     R"({"architectures": ["PhiMoEForCausalLM"], "attention_bias": true, "hidden_size": 4096, "intermediate_size":
     6400, "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads":
     8, "num_local_experts": 16, "sliding_window": 2047, "tie_word_embeddings": false, "vocab_size": 32064})"},
    {"Qwen3.5-122B-A10B", 122, 10, true,
     R"({"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config":
     {"attn_output_gate": true, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 3072,
     "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 64,
     "linear_value_head_dim": 128, "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 1024,
     "mtp_num_hidden_layers": 1, "num_attention_heads": 32, "num_experts": 256, "num_experts_per_tok": 8,
     "num_hidden_layers": 48, "num_key_value_heads": 2, "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta":
     10000000, "rope_type": "default"}, "shared_expert_intermediate_size": 1024, "tie_word_embeddings": false,
     "vocab_size": 248320}, "vision_config": {"depth": 27}})"},
    {"Qwen3.5-397B-A17B", 397, 17, true,
     R"({"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "text_config":
     {"attn_output_gate": true, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 4096,
     "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 64,
     "linear_value_head_dim": 128, "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 1024,
     "mtp_num_hidden_layers": 1, "num_attention_heads": 32, "num_experts": 512, "num_experts_per_tok": 10,
     "num_hidden_layers": 60, "num_key_value_heads": 2, "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta":
     10000000, "rope_type": "default"}, "shared_expert_intermediate_size": 1024, "tie_word_embeddings": false,
     "vocab_size": 248320}, "vision_config": {"depth": 27}})"},
    {"dots.llm1", 142.8, 14, true,
     R"({"architectures": ["Dots1ForCausalLM"], "attention_bias": false, "first_k_dense_replace": 1, "head_dim":
     128, "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1,
     "n_routed_experts": 128, "n_shared_experts": 2, "norm_topk_prob": true, "num_attention_heads": 32,
     "num_experts_per_tok": 6, "num_hidden_layers": 62, "num_key_value_heads": 32, "routed_scaling_factor": 2.5,
     "scoring_func": "noaux_tc", "topk_group": 1, "topk_method": "noaux_tc", "tie_word_embeddings": false,
     "vocab_size": 152064})"},
};

} // namespace

TEST_CASE("published configs: as many parameters as the model cards say") {
    for (const Published& p : published) {
        CAPTURE(std::string(p.name));
        const moe::model::Model model = moe::families::model_from_json(p.config, "config.json");
        const moe::model::ParameterCount count = moe::model::count_parameters(model);
        CHECK(static_cast<double>(count.total_no_mtp) / 1e9 == nearly(p.total).epsilon(0.01));
        CHECK(static_cast<double>(count.active) / 1e9 == nearly(p.active).epsilon(0.03));
        CHECK(model.not_executable.empty() == p.executable);
    }
}

TEST_CASE("published configs: what differs from their neighbours") {
    const auto read = [](const char* name) {
        for (const Published& p : published)
            if (std::string(p.name) == name) return moe::families::model_from_json(p.config, "config.json");
        return moe::model::Model{};
    };
    const moe::model::Model ernie = read("ERNIE-4.5-21B-A3B");
    CHECK_FALSE(ernie.kind_of(0).moe.has_value());
    CHECK(ernie.kind_of(1).moe->shared_ffn == 2 * 1536);
    CHECK(ernie.kind_of(1).moe->router.expert_bias);
    CHECK(ernie.rope_interleaved);
    CHECK(read("Hunyuan-A13B").kind_of(0).moe->shared_ffn == 3072);
    CHECK(read("MiniMax-M2").kind_of(0).attention.rope_dim == 64);
    CHECK(read("Mistral-7B").kind_of(31).attention.window == 4096);
    const moe::model::Model dots = read("dots.llm1");
    CHECK_FALSE(dots.kind_of(0).moe.has_value());
    CHECK(dots.kind_of(1).moe->router.scoring == moe::model::Scoring::sigmoid);
    CHECK(dots.kind_of(1).moe->router.expert_bias);
    CHECK(dots.kind_of(1).attention.qk_norm);
    CHECK(read("DBRX").kind_of(39).moe->top_k == 4);
    const moe::model::Model qwen = read("Qwen3.5-397B-A17B");
    CHECK(qwen.kind_of(2).attention.kind == moe::model::AttentionKind::gated_delta);
    CHECK(qwen.kind_of(3).attention.output_gate);
    CHECK(qwen.kind_of(3).moe->router.normalize);
    CHECK(qwen.mtp.size() == 1);
}

TEST_CASE(
    "GLM-4.5V: the language model of GLM-4.5-Air, less MTP, with partly rotated heads as transformers 5 writes them") {
    const moe::model::Model model = moe::families::model_from_json(
        R"({"architectures": ["Glm4vMoeForConditionalGeneration"], "model_type": "glm4v_moe", "text_config":
        {"attention_bias": true, "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 10944, "model_type": "glm4v_moe_text", "moe_intermediate_size": 1408, "n_group": 1,
        "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 96,
        "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8, "rope_parameters": {"mrope_section":
        [8, 12, 12], "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_type": "default"}, "topk_group": 1,
        "use_qk_norm": false, "vocab_size": 151552}, "vision_config": {"depth": 24}})",
        "config.json");
    const moe::model::Model air = moe::families::load_model("GLM-4.5-Air");
    CHECK(model.kinds == air.kinds);
    CHECK(model.layers == air.layers);
    CHECK(moe::model::count_parameters(model).total == moe::model::count_parameters(air).total_no_mtp);
}

TEST_CASE("DeepSeek-V3.2: V3 with an indexer in every layer, and V3 itself without the field") {
    const std::string config = R"({"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
        "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "moe_intermediate_size": 2048,
        "n_routed_experts": 256, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280)";
    CHECK(moe::families::model_from_json(config + "}", "config.json").kinds ==
          moe::families::load_model("DeepSeek-V3").kinds);
    const moe::model::Model sparse = moe::families::model_from_json(config + R"(, "index_topk": 2048})", "config.json");
    CHECK(sparse.kinds == moe::families::load_model("DeepSeek-V3.2").kinds);
    const double indexer = 1536.0 * 64 * 128 + 7168.0 * (128 + 64) + 2 * 128;
    CHECK(static_cast<double>(moe::model::count_parameters(sparse).total_no_mtp -
                              moe::model::count_parameters(moe::families::load_model("DeepSeek-V3")).total_no_mtp) ==
          nearly(61 * indexer));
}

TEST_CASE("GLM-4.7-Flash: 30 billion parameters, latent attention, a layer for MTP") {
    const moe::model::Model model = moe::families::model_from_json(
        R"({"architectures": ["Glm4MoeLiteForCausalLM"], "first_k_dense_replace": 1, "hidden_size": 2048,
        "intermediate_size": 10240, "kv_lora_rank": 512, "moe_intermediate_size": 1536, "n_routed_experts": 64,
        "n_shared_experts": 1, "num_attention_heads": 20, "num_experts_per_tok": 4, "num_hidden_layers": 47,
        "num_nextn_predict_layers": 1, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
        "routed_scaling_factor": 1.8, "v_head_dim": 256, "vocab_size": 154880})",
        "config.json");
    CHECK(static_cast<double>(moe::model::count_parameters(model).total_no_mtp) / 1e9 == nearly(30).epsilon(0.01));
    CHECK(model.kind_of(1).attention.kind == moe::model::AttentionKind::mla);
    CHECK(model.kind_of(1).moe->router.expert_bias);
    CHECK(model.mtp.size() == 1);
    CHECK(model.not_executable.empty());
}

TEST_CASE("Llama 4: layers with rotary positions see their chunk alone, every fourth all of the sequence") {
    moe::model::Model scout = moe::families::load_model("Llama4-Scout");
    CHECK(scout.kind_of(0).attention.chunk == 8192);
    CHECK(scout.kind_of(3).attention.chunk == 0);
    moe::model::Model whole = scout;
    for (moe::model::LayerKind& kind : whole.kinds) kind.attention.chunk = 0;
    CHECK(moe::model::model_flops_per_token(scout, 8192) == moe::model::model_flops_per_token(whole, 8192));
    // Three layers of four see 4,096 of 131,072 positions on the average, and one 65,536.
    const double pair = 40.0 * 2 * 128, seen = 36 * 4096.0 + 12 * 65536.0, all = 48 * 65536.0;
    CHECK(moe::model::model_flops_per_token(whole, 131072) - moe::model::model_flops_per_token(scout, 131072) ==
          nearly(6.0 * pair * (all - seen)));
    moe::model::Attention chunked;
    chunked.chunk = 4;
    CHECK(moe::model::keys_seen(chunked, 10) == nearly((2 * 4.0 * 4 / 2 + 2.0 * 2 / 2) / 10));
}

TEST_CASE("what an architecture's reader does not know of a layer is refused, not priced as something else") {
    const auto fault = [](const char* name, const std::string& more) {
        for (const Published& p : published) {
            if (std::string(p.name) != name) continue;
            const std::string config = p.config;
            return fault_of([&] {
                moe::families::model_from_json(config.substr(0, config.size() - 1) + ", " + more + "}", "c.json");
            });
        }
        return std::string("no such model");
    };
    const auto holds = [](const std::string& line, const std::string& words) {
        CAPTURE(line);
        CHECK(line.find(words) != std::string::npos);
    };
    holds(fault("OLMoE-1B-7B", R"("layer_types": ["full_attention", "linear_attention"])"),
          "\"linear_attention\" is not");
    holds(fault("dots.llm1", R"("index_topk": 2048)"), "index_topk = 2048");
    holds(fault("MiniMax-M2", R"("attn_type_list": [1, 0])"), "linear attention (0) is not supported");
    CHECK(fault("MiniMax-M2", R"("attn_type_list": [1, 1])").empty());
    holds(fault("Mistral-7B", R"("num_local_experts": 8)"), "num_local_experts = 8: MistralForCausalLM has no experts");
}

TEST_CASE("architectures of two natures are refused as such, near names alone are suggested") {
    const auto fault = [](const std::string& name) {
        return fault_of([&] {
            moe::families::model_from_json("{\"architectures\": [\"" + name + "\"], \"hidden_size\": 64}",
                                           "config.json");
        });
    };
    const auto holds = [](const std::string& line, const std::string& words) {
        CAPTURE(line);
        CHECK(line.find(words) != std::string::npos);
    };
    holds(fault("Zamba2ForCausalLM"), "hybrid Mamba layers are not supported");
    holds(fault("OlmoHybridForCausalLM"), "hybrid linear attention layers are not supported");
    holds(fault("LongcatFlashNgramForCausalLM"), "embeddings of n-grams are not supported");
    holds(fault("Lfm3ForCausalLM"), "hybrid convolution layers are not supported");
    holds(fault("Dots2ForCausalLM"), "did you mean Dots1ForCausalLM?");
    CHECK(fault("BloomForCausalLM").find("did you mean") == std::string::npos); // all but the name is alike
}
