// Models: what each architecture's config.json means, real Hugging Face files included, and the refusal of bad ones.
#include "planner/model/families/load_model.hpp"
#include "planner/model/model.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/support/changed.hpp"

#include <doctest/doctest.h>

#include <string>

namespace {

moe::model::Model read(const std::string& text) { return moe::families::model_from_json(text, "config.json"); }
std::string fault(const std::string& text) {
    return fault_of([&] { read(text); });
}

// A small sound config with `more` fields in place of or behind its own; later duplicates win in JSON.
std::string mixtral(const std::string& more) {
    return changed(
        R"({"architectures": ["MixtralForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 256, "num_local_experts": 8,
        "num_experts_per_tok": 2})",
        more);
}

std::string deepseek(const std::string& architecture, const std::string& more) {
    return changed(R"({"architectures": [")" + architecture + R"("], "hidden_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 16, "n_shared_experts": 2,
        "num_experts_per_tok": 4, "vocab_size": 256})",
                   more);
}

} // namespace

TEST_CASE("DeepSeek-V3 from its profile") {
    const moe::model::Model model = moe::families::load_model("DeepSeek-V3");
    CHECK(model.name == "DeepSeek-V3");
    CHECK(model.layers.size() == 61);
    CHECK(model.mtp.size() == 1);
    CHECK(model.kinds.size() == 2);
    CHECK(model.rope_interleaved);
    CHECK_FALSE(model.kind_of(2).moe.has_value());
    CHECK(model.kind_of(2).dense_ffn == 18432);
    REQUIRE(model.kind_of(3).moe.has_value());
    const moe::model::Moe& moe = *model.kind_of(3).moe;
    CHECK(moe.experts == 256);
    CHECK(moe.shared_ffn == 2048);
    CHECK(moe.router.scoring == moe::model::Scoring::sigmoid);
    CHECK(moe.router.groups == 8);
    CHECK(moe.router.groups_kept == 4);
    CHECK(moe.router.group_score_top == 2);
    CHECK(moe.router.expert_bias);
    CHECK(moe.router.normalize);
    CHECK(moe.router.scale == 2.5);
    const moe::model::Attention& attention = model.kind_of(0).attention;
    CHECK(attention.kind == moe::model::AttentionKind::mla);
    CHECK(attention.qk_dim == 192);
    CHECK(attention.v_dim == 128);
    CHECK(model.not_executable.empty());
}

TEST_CASE("routers differ by architecture as the reference implementations do") {
    const auto router = [](const std::string& text) {
        return read(text).kind_of(3 % static_cast<int>(read(text).layers.size())).moe->router;
    };
    SUBCASE("Mixtral: softmax over the chosen logits") {
        CHECK(router(mixtral("")).softmax_after_top_k);
        CHECK_FALSE(router(mixtral("")).normalize);
    }
    SUBCASE("DeepSeek-V2 greedy ignores groups and does not normalise") {
        const moe::model::Router r =
            router(deepseek("DeepseekV2ForCausalLM", R"("n_group": 4, "topk_group": 2, "routed_scaling_factor": 16)"));
        CHECK(r.scoring == moe::model::Scoring::softmax);
        CHECK(r.groups == 1);
        CHECK(r.scale == 16.0);
        CHECK_FALSE(r.normalize);
        CHECK_FALSE(r.expert_bias);
    }
    SUBCASE("DeepSeek-V2 group-limited: best expert scores the group") {
        const moe::model::Router r = router(deepseek(
            "DeepseekV2ForCausalLM", R"("n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy")"));
        CHECK(r.groups == 4);
        CHECK(r.groups_kept == 2);
        CHECK(r.group_score_top == 1);
    }
    SUBCASE("DeepSeek-V3 defaults: sigmoid, best two experts score the group, selection bias") {
        const moe::model::Router r = router(deepseek("DeepseekV3ForCausalLM", R"("n_group": 4, "topk_group": 2)"));
        CHECK(r.scoring == moe::model::Scoring::sigmoid);
        CHECK(r.group_score_top == 2);
        CHECK(r.expert_bias);
        CHECK(r.normalize);
        CHECK(r.scale == 2.5);
    }
}

TEST_CASE("a Qwen2-MoE config as Hugging Face ships it") {
    const moe::model::Model model =
        read(R"({"architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "decoder_sparse_step": 2, "mlp_only_layers": [3], "hidden_act": "silu", "hidden_size": 64, "initializer_range": 0.02,
        "intermediate_size": 96, "max_window_layers": 21, "model_type": "qwen2_moe", "moe_intermediate_size": 32,
        "norm_topk_prob": false, "num_attention_heads": 4, "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 6,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "shared_expert_intermediate_size": 80,
        "sliding_window": 32768, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_sliding_window": false,
        "rope_scaling": null, "head_dim": null, "vocab_size": 256})");
    // Every second layer is sparse, except layer 3 which mlp_only_layers makes dense.
    for (int layer = 0; layer < 6; ++layer) CHECK(model.kind_of(layer).moe.has_value() == (layer == 1 || layer == 5));
    CHECK(model.kind_of(1).moe->shared_ffn == 80);
    CHECK(model.kind_of(1).moe->shared_gate);
    CHECK_FALSE(model.kind_of(1).moe->router.normalize);
    CHECK(model.kind_of(0).attention.qkv_bias);
    CHECK_FALSE(model.kind_of(0).attention.out_bias);
    CHECK(model.kind_of(0).attention.qk_dim == 16);
    CHECK(model.kind_of(0).attention.window == 0);
    CHECK(model.rope_theta == 1e6);
    CHECK(model.vocab_divisor == 128);
    CHECK(model.not_executable.empty());
}

TEST_CASE("a GPT-OSS config as Hugging Face ships it") {
    const moe::model::Model model =
        read(R"({"architectures": ["GptOssForCausalLM"], "attention_bias": true, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 128, "intermediate_size": 96, "layer_types": ["sliding_attention",
        "full_attention", "full_attention"], "model_type": "gpt_oss", "num_attention_heads": 4, "num_experts_per_tok": 2,
        "num_hidden_layers": 3, "num_key_value_heads": 2, "num_local_experts": 4, "quantization_config": {"quant_method":
        "mxfp4"}, "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0},
        "sliding_window": 128, "swiglu_limit": 7.0, "vocab_size": 512})");
    CHECK(model.kind_of(0).attention.window == 128);
    CHECK(model.kind_of(1).attention.window == 0);
    CHECK(model.kind_of(2).attention.window == 0);
    CHECK(model.kind_of(0).attention.sinks);
    CHECK(model.kind_of(0).activation == moe::model::Activation::quick_gelu);
    CHECK(model.kind_of(0).swiglu_limit == 7.0);
    CHECK(model.kind_of(0).moe->expert_bias);
    CHECK(model.rope_scaling.factor == 32.0);
    CHECK_FALSE(model.not_executable.empty());
}

TEST_CASE("a vision-language Llama 4 config keeps its language model in text_config") {
    const moe::model::Model model =
        read(R"({"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4",
        "text_config": {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "intermediate_size": 32, "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2, "vocab_size": 256}, "vision_config": {"hidden_size": 1408}})");
    CHECK(model.hidden == 64);
    CHECK_FALSE(model.kind_of(0).moe.has_value());
    CHECK(model.kind_of(0).dense_ffn == 96);
    REQUIRE(model.kind_of(1).moe.has_value());
    CHECK(model.kind_of(1).moe->shared_ffn == 32);
}

TEST_CASE("what execute cannot train is named, with what would run where one change is enough") {
    CHECK(read(mixtral("")).not_executable.empty());
    CHECK(read(mixtral(R"("rope_scaling": {"type": "yarn", "factor": 1.0})")).not_executable.empty());
    CHECK(read(mixtral(R"("tie_word_embeddings": true)")).not_executable.empty());
    CHECK(read(mixtral(R"("rope_scaling": {"rope_type": "yarn", "factor": 40})"))
              .not_executable.find("rope_scaling = yarn") == 0);
    CHECK(read(mixtral(R"("sliding_window": 4096)")).not_executable.empty());
    CHECK(read(mixtral(R"("hidden_act": "gelu")")).not_executable.empty());
    CHECK(moe::families::load_model("GPT-OSS-20B").not_executable.empty());
    for (const char* name : {"DeepSeek-V4-Flash", "Grok-1", "GPT3-175B"}) {
        CAPTURE(name);
        CHECK_FALSE(moe::families::load_model(name).not_executable.empty());
    }
    for (const char* name : {"Qwen3-30B-A3B", "Qwen2-57B-A14B", "Mixtral-8x7B", "Kimi-K2", "DeepSeek-V2-Lite",
                             "Llama3-8B", "Llama4-Scout", "Nemotron-4-15B", "GPT-MLM-1.7B", "DBRX", "MiniMax-M2",
                             "Qwen3-Next-80B-A3B", "Nemotron-3-Super", "Nemotron-H-56B"}) {
        CAPTURE(name);
        CHECK(moe::families::load_model(name).not_executable.empty());
    }
}

TEST_CASE("a vision-language config of another name is read by the language model inside") {
    const std::string inside = R"("text_config": {"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 32, "intermediate_size": 96,
        "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 256}, "vision_config": {"hidden_size": 1408}})";
    for (const char* outside : {"SomeVisionForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"}) {
        const moe::model::Model model = read("{\"architectures\": [\"" + std::string(outside) + "\"], " + inside);
        CHECK(model.architecture == "Qwen3MoeForCausalLM");
        CHECK(model.kind_of(1).moe->experts == 8);
        CHECK(model.left_out == std::vector<std::string>{"vision_config"});
    }
    // InternVL writes it so, and with the suffix that a language model inside may bear.
    std::string elsewhere = inside;
    elsewhere.replace(elsewhere.find("text_config"), 11, "llm_config");
    elsewhere.replace(elsewhere.find("qwen3_moe"), 9, "qwen3_vl_moe_text");
    const moe::model::Model model = read(R"({"architectures": ["SomeVisionChatModel"], )" + elsewhere);
    CHECK(model.architecture == "Qwen3MoeForCausalLM");
    CHECK(model.hidden == 64);
    CHECK(model.left_out == std::vector<std::string>{"vision_config"});
    CHECK(fault(R"({"architectures": ["SomeVisionModel"], "text_config": {"model_type": "bert"}})")
              .find("SomeVisionModel\": unknown architecture") != std::string::npos);
}

TEST_CASE("text that is no config is refused with its place") {
    CHECK(fault(R"({"architectures": ["Mix)").starts_with("2: config.json: not valid JSON: "));
    CHECK(fault(R"({"architectures": ["Mix)").find("at line 1, column 24") != std::string::npos);
    CHECK(fault("").find("not valid JSON") != std::string::npos);
    CHECK(fault("[1]") == "2: config.json: must be a JSON object, but is an array of 1 elements");
    CHECK(fault(std::string(100000, '[')).find("not valid JSON") != std::string::npos);
    CHECK(fault(std::string(200, '[') + std::string(200, ']')) ==
          "2: config.json: not valid JSON: nested more than 100 deep at line 1, column 101");
    CHECK(fault("{}") == "2: config.json: field \"architectures\" is missing");
    CHECK(fault(R"({"architectures": "LlamaForCausalLM"})").find("must be an array of strings") != std::string::npos);
}

TEST_CASE("unknown architectures and models suggest the nearest name") {
    CHECK(fault(R"({"architectures": ["DeepSeekV3ForCausalM"]})").find("did you mean DeepseekV3ForCausalLM?") !=
          std::string::npos);
    CHECK(fault(R"({"architectures": ["BertModel"]})").find("architectures = \"BertModel\": unknown architecture") !=
          std::string::npos);
    CHECK(fault_of([] { moe::families::load_model("DeepSeek-V33"); }) ==
          "2: unknown model 'DeepSeek-V33': did you mean DeepSeek-V3?");
    CHECK(fault_of([] { moe::families::load_model("qwen3-30b"); }) ==
          "2: unknown model 'qwen3-30b': did you mean Qwen3-30B-A3B?");
    CHECK(fault_of([] { moe::families::load_model("./no-such.json"); }) ==
          "2: cannot read ./no-such.json: No such file or directory");
}

TEST_CASE("hostile numbers are refused by field and value") {
    const auto refused = [](const std::string& field, const std::string& value, const std::string& part) {
        const std::string text = fault(mixtral("\"" + field + "\": " + value));
        CAPTURE(text);
        CHECK(text.starts_with("2: config.json: "));
        CHECK(text.find(field) != std::string::npos);
        CHECK(text.find(part) != std::string::npos);
    };
    refused("hidden_size", "-64", "hidden_size = -64");
    refused("hidden_size", "0", "must be a whole number");
    refused("hidden_size", "64.5", "64.5");
    refused("hidden_size", "\"64\"", "must be a whole number");
    refused("hidden_size", "1e300", "must be a whole number");
    refused("hidden_size", "18446744073709551615", "18446744073709551615");
    refused("hidden_size", "null", "hidden_size = null: must be given a value");
    refused("num_hidden_layers", "1000000000", "from 1 to 16384");
    refused("vocab_size", "1", "vocab_size = 1");
    refused("num_key_value_heads", "3", "must divide num_attention_heads = 4");
    refused("num_attention_heads", "5", "must divide hidden_size = 64");
    refused("num_experts_per_tok", "9", "must not exceed the 8 experts");
    refused("num_local_experts", "[8]", "must be a whole number");
    refused("rope_theta", "-1", "rope_theta = -1");
    refused("rms_norm_eps", "\"small\"", "must be a number");
    refused("tie_word_embeddings", "\"no\"", "must be true or false");
    refused("hidden_act", "\"tanh\"", "must be silu");
    CHECK(
        fault(mixtral(
                  R"("hidden_size": 1048576, "head_dim": 16, "intermediate_size": 16777216, "num_local_experts": 65536,
        "num_hidden_layers": 16384)"))
            .find("more than 9e+15 parameters") != std::string::npos);
}

TEST_CASE("numbers that contradict each other are refused") {
    CHECK(fault(deepseek("DeepseekV3ForCausalLM", R"("n_group": 3, "topk_group": 1)"))
              .find("n_group = 3: must divide the 16 experts") != std::string::npos);
    CHECK(fault(deepseek("DeepseekV3ForCausalLM", R"("n_group": 4, "topk_group": 5)"))
              .find("must not exceed n_group = 4") != std::string::npos);
    CHECK(fault(deepseek("DeepseekV3ForCausalLM", R"("n_group": 8, "topk_group": 1)"))
              .find("fewer than num_experts_per_tok = 4") != std::string::npos);
    CHECK(fault(deepseek("DeepseekV3ForCausalLM", R"("n_group": 16, "topk_group": 8)"))
              .find("leaves 1 expert per group") != std::string::npos);
    CHECK(fault(deepseek("DeepseekV3ForCausalLM", R"("qk_rope_head_dim": 7)")).find("7 rotary columns") !=
          std::string::npos);
    CHECK(fault(deepseek("DeepseekV3ForCausalLM", R"("topk_method": "best")")).find("topk_method = \"best\"") !=
          std::string::npos);
    CHECK(fault(deepseek("DeepseekV3ForCausalLM", R"("n_shared_experts": -1)")).find("n_shared_experts = -1") !=
          std::string::npos);
}

TEST_CASE("a model without a name takes one that its own text then carries") {
    const moe::model::Model model = read(mixtral(""));
    CHECK(read(model.config_json).name == model.name);
    CHECK(read(mixtral(R"("name": "mine")")).name == "mine");
    CHECK(read(read(mixtral(R"("name": "mine")")).config_json).config_json ==
          read(mixtral(R"("name": "mine")")).config_json);
}
