// config.json of architectures whose layers differ from each other, a few layers deep.
#pragma once

#include <string>
#include <vector>

inline std::vector<std::string> small_mixed_models() {
    const std::string sizes =
        R"("hidden_size": 256, "head_dim": 64, "intermediate_size": 384, "moe_intermediate_size": 128,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "sliding_window": 128, "vocab_size": 512, "tie_word_embeddings": false)";
    const std::string types = R"("layer_types": ["sliding_attention", "sliding_attention", "sliding_attention",
        "full_attention"])";
    const auto named = [&](const std::string& name, const std::string& rest) {
        return "{\"architectures\": [\"" + name + "\"], " + sizes + ", " + types + (rest.empty() ? "" : ", " + rest) +
               "}";
    };
    return {
        named("AfmoeForCausalLM", R"("num_dense_layers": 1, "num_shared_experts": 1)"),
        named("ExaoneMoeForCausalLM", R"("num_nextn_predict_layers": 1)"),
        named("MiMoV2FlashForCausalLM", R"("v_head_dim": 32, "num_nextn_predict_layers": 1, "mlp_layer_types": ["dense",
            "sparse", "sparse", "sparse"])"),
        named("LagunaForCausalLM", R"("num_attention_heads_per_layer": [8, 8, 8, 4])"),
        named(
            "Gemma4ForCausalLM",
            R"("attention_k_eq_v": true, "enable_moe_block": true, "hidden_size_per_layer_input": 0, "global_head_dim": 128,
            "num_global_key_value_heads": 1, "top_k_experts": 2)"),
        named("HYV3ForCausalLM", R"("num_nextn_predict_layers": 1)"),
        named("SolarOpenForCausalLM", ""),
        named("Step3p5ForCausalLM", R"("attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 2},
            "num_attention_groups": 2, "moe_layers_enum": "1,2,3", "moe_num_experts": 8, "moe_top_k": 2, "share_expert_dim": 128,
            "use_head_wise_attn_gate": true, "num_nextn_predict_layers": 2)"),
    };
}

inline std::string small_granite() {
    return R"({"architectures": ["GraniteMoeHybridForCausalLM"], "hidden_size": 256, "intermediate_size": 128, "layer_types":
        ["mamba", "attention", "mamba"], "mamba_d_state": 16, "mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_chunk_size":
        64, "num_attention_heads": 4, "num_experts_per_tok": 2, "num_hidden_layers": 3, "num_key_value_heads": 2,
        "num_local_experts": 8, "shared_intermediate_size": 192, "vocab_size": 512, "tie_word_embeddings": false})";
}
