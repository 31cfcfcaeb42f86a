// config.json, as published, of families whose layers differ from each other, less what no reader looks at.
#pragma once

#include <string>

namespace moe::test {

// A JSON list of so many entries; `odd` where the index is a multiple of `step` after `first`.
inline std::string list(int count, int first, int step, const std::string& odd, const std::string& usual) {
    std::string text = "[";
    for (int i = 0; i < count; ++i) text += (i > 0 ? ", " : "") + (i >= first && (i - first) % step == 0 ? odd : usual);
    return text + "]";
}

inline const std::string full = "\"full_attention\"", window = "\"sliding_attention\"";

inline std::string mimo_flash() { // every sixth layer and the first see everything
    return R"({"architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "add_full_attention_sink_bias":
    false, "add_swa_attention_sink_bias": true, "attention_bias": false, "head_dim": 192, "hidden_act": "silu",
    "hidden_size": 4096, "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0,
    1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0], "intermediate_size": 16384,
    "layernorm_epsilon": 1e-5, "moe_intermediate_size": 2048, "moe_layer_freq": )" +
           list(48, 0, 48, "0", "1") + R"(, "n_group": 1, "n_routed_experts": 256, "n_shared_experts": null,
    "norm_topk_prob": true, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "partial_rotary_factor": 0.334, "rope_theta": 5000000, "routed_scaling_factor": null,
    "scoring_func": "sigmoid", "sliding_window": 128, "swa_head_dim": 192, "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8, "swa_rope_theta": 10000, "swa_v_head_dim": 128, "topk_group": 1, "topk_method":
    "noaux_tc", "v_head_dim": 128, "vocab_size": 152576})";
}

inline std::string mimo_pro() {
    return R"({"architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2", "add_full_attention_sink_bias": false,
    "add_swa_attention_sink_bias": true, "head_dim": 192, "hidden_size": 6144, "hybrid_layer_pattern": [0, 1, 1, 1, 1, 1,
    1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1,
    1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0], "intermediate_size": 16384,
    "layernorm_epsilon": 1e-5, "moe_intermediate_size": 2048, "moe_layer_freq": )" +
           list(70, 0, 70, "0", "1") +
           R"(, "n_routed_experts": 384, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 70, "num_key_value_heads": 8, "num_nextn_predict_layers": 3, "partial_rotary_factor": 0.334,
    "routed_scaling_factor": null, "scoring_func": "sigmoid", "sliding_window": 128, "swa_head_dim": 192,
    "swa_num_attention_heads": 128, "swa_num_key_value_heads": 8, "swa_v_head_dim": 128, "topk_method": "noaux_tc",
    "v_head_dim": 128, "vocab_size": 152576})";
}

inline std::string step_flash() {
    std::string experts;
    for (int layer = 3; layer < 45; ++layer) experts += (layer > 3 ? "," : "") + std::to_string(layer);
    return R"({"architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "att_impl_type": "GQA",
    "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 96, "num_attention_groups":
    8, "head_dim": 128}, "head_dim": 128, "hidden_size": 4096, "intermediate_size": 11264, "layer_types": )" +
           list(48, 0, 4, full, window) + R"(, "moe_intermediate_size": 1280, "moe_layers_enum": ")" + experts +
           R"(", "moe_num_experts": 288, "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0, "moe_top_k":
    8, "norm_expert_weight": true, "num_attention_groups": 8, "num_attention_heads": 64, "num_hidden_layers": 45,
    "num_nextn_predict_layers": 3, "partial_rotary_factors": )" +
           list(48, 0, 4, "0.5", "1.0") + R"(, "rope_theta": )" + list(48, 0, 4, "5000000.0", "10000.0") +
           R"(, "share_expert_dim": 1280, "sliding_window": 512, "use_head_wise_attn_gate": true, "use_moe_router_bias":
    true, "use_qk_norm": true, "vocab_size": 128896})";
}

inline std::string trinity(const std::string& sizes, int layers) {
    return R"({"architectures": ["AfmoeForCausalLM"], "model_type": "afmoe", "global_attn_every_n_layers": 4, "head_dim":
    128, "hidden_act": "silu", "layer_types": )" +
           list(layers, 3, 4, full, window) + R"(, "mup_enabled": true, "n_group": 1, "num_hidden_layers": )" +
           std::to_string(layers) +
           R"(, "num_shared_experts": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000, "route_norm":
    true, "route_scale": 2.826, "score_func": "sigmoid", "topk_group": 1, "tie_word_embeddings": false, "vocab_size":
    200192, )" +
           sizes + "}";
}

inline std::string trinity_mini() {
    return trinity(
        R"("hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 1024, "num_attention_heads":
    32, "num_dense_layers": 2, "num_experts": 128, "num_experts_per_tok": 8, "num_key_value_heads": 4, "sliding_window":
    2048)",
        32);
}

inline std::string trinity_large() {
    return trinity(R"("hidden_size": 3072, "intermediate_size": 12288, "moe_intermediate_size": 3072,
    "num_attention_heads": 48, "num_dense_layers": 6, "num_experts": 256, "num_experts_per_tok": 4, "num_key_value_heads":
    8, "sliding_window": 4096)",
                   60);
}

inline std::string k_exaone() {
    return R"({"architectures": ["ExaoneMoEForCausalLM"], "model_type": "exaone_moe", "attention_dropout": 0.0,
    "first_last_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 6144, "intermediate_size": 18432,
    "is_moe_layer": )" +
           list(48, 0, 48, "false", "true") + R"(, "layer_types": )" + list(48, 3, 4, full, window) +
           R"(, "moe_intermediate_size": 2048, "n_group": 1, "norm_topk_prob": true, "num_attention_heads": 64,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 8, "num_shared_experts":
    1, "rms_norm_eps": 1e-5, "rope_theta": 1000000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "sliding_window": 128, "sliding_window_pattern": "LLLG", "tie_word_embeddings": false, "topk_group": 1, "topk_method":
    "noaux_tc", "vocab_size": 153600})";
}

inline std::string solar_open() {
    return R"({"architectures": ["SolarOpenForCausalLM"], "model_type": "solar_open", "head_dim": 128, "hidden_size": 4096,
    "intermediate_size": 10240, "moe_intermediate_size": 1280, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
    "norm_topk_prob": true, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 8, "routed_scaling_factor": 1.0, "topk_group": 1, "vocab_size": 196608})";
}

inline std::string hy3() {
    return R"({"architectures": ["HYV3ForCausalLM"], "model_type": "hy_v3", "first_k_dense_replace": 1, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 13312, "moe_intermediate_size": 1536,
    "moe_router_enable_expert_bias": true, "moe_router_use_sigmoid": true, "num_attention_heads": 64, "num_experts": 192,
    "num_experts_per_tok": 8, "num_hidden_layers": 80, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
    "num_shared_experts": 1, "qk_norm": true, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 11158840.0,
    "rope_type": "default"}, "route_norm": true, "router_scaling_factor": 2.826, "tie_word_embeddings": false, "vocab_size":
    120832})";
}

inline std::string laguna_s() {
    return R"({"architectures": ["LagunaForCausalLM"], "model_type": "laguna", "gating": "per-head", "head_dim": 128,
    "hidden_size": 3072, "intermediate_size": 12288, "layer_types": )" +
           list(48, 0, 4, full, window) + R"(, "mlp_layer_types": )" + list(48, 0, 48, "\"dense\"", "\"sparse\"") +
           R"(, "moe_intermediate_size": 1024, "moe_routed_scaling_factor": 2.5, "norm_topk_prob": true,
    "num_attention_heads": 48, "num_attention_heads_per_layer": )" +
           list(48, 0, 4, "48", "72") + R"(, "num_experts": 256, "num_experts_per_tok": 10, "num_hidden_layers": 48,
    "num_key_value_heads": 8, "rope_parameters": {"full_attention": {"rope_theta": 500000.0, "rope_type": "yarn", "factor":
    128.0, "original_max_position_embeddings": 8192, "partial_rotary_factor": 0.5}, "sliding_attention": {"rope_type":
    "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}}, "shared_expert_intermediate_size": 1024,
    "sliding_window": 512, "vocab_size": 100352})";
}

inline std::string granite_small() {
    return R"({"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_size": 4096,
    "intermediate_size": 768, "layer_types": )" +
           list(40, 5, 10, "\"attention\"", "\"mamba\"") +
           R"(, "mamba_chunk_size": 256, "mamba_d_conv": 4, "mamba_d_head":
    64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128, "num_attention_heads": 32,
    "num_experts_per_tok": 10, "num_hidden_layers": 40, "num_key_value_heads": 8, "num_local_experts": 72,
    "position_embedding_type": "nope", "shared_intermediate_size": 1536, "tie_word_embeddings": true, "vocab_size":
    100352})";
}

inline std::string gemma4() {
    return R"({"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": {"attention_bias":
    false, "attention_k_eq_v": true, "enable_moe_block": true, "final_logit_softcapping": 30.0, "global_head_dim": 512,
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2816, "hidden_size_per_layer_input": 0,
    "intermediate_size": 2112, "layer_types": )" +
           list(30, 5, 6, full, window) + R"(, "model_type": "gemma4_text", "moe_intermediate_size": 704,
    "num_attention_heads": 16, "num_experts": 128, "num_global_key_value_heads": 2, "num_hidden_layers": 30,
    "num_key_value_heads": 8, "num_kv_shared_layers": 0, "rms_norm_eps": 1e-6, "rope_parameters": {"full_attention":
    {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"}, "sliding_attention":
    {"rope_theta": 10000.0, "rope_type": "default"}}, "sliding_window": 1024, "tie_word_embeddings": true, "top_k_experts": 8,
    "use_double_wide_mlp": false, "vocab_size": 262144}, "vision_config": {"depth": 27}})";
}

inline std::string mistral_small4() {
    return R"({"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config":
    {"first_k_dense_replace": 0, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 12288, "kv_lora_rank": 256,
    "model_type": "mistral4", "moe_intermediate_size": 2048, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
    "norm_topk_prob": true, "num_attention_heads": 32, "num_experts_per_tok": 4, "num_hidden_layers": 36,
    "num_key_value_heads": 32, "q_lora_rank": 1024, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "rope_parameters":
    {"type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}, "routed_scaling_factor": 1.0, "tie_word_embeddings": false,
    "topk_group": 1, "v_head_dim": 128, "vocab_size": 131072}, "vision_config": {"depth": 24}})";
}

} // namespace moe::test
