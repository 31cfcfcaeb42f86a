// Ling and Ring of three generations, and MiniMax-01: grouped-query or latent attention in all layers, or in every
// so-many-th, the others of which are linear attention.
#include "planner/base/error.hpp"
#include "planner/model/families/families.hpp"
#include "planner/model/families/opaque_parts.hpp"
#include "planner/model/families/parts.hpp"

#include <algorithm>

namespace moe::families {
namespace {

// DeepSeek's experts in Ling's words, or in those that transformers saves.
model::Moe read_ling_experts(const JsonObject& json, const char* fallback_scoring) {
    model::Moe moe;
    moe.experts = integer(json, spelled(json, "num_experts", "num_local_experts"), max_experts);
    moe.top_k = integer(json, spelled(json, "num_experts_per_tok", "num_experts_per_token"), max_experts);
    moe.ffn = ffn(json, "moe_intermediate_size");
    const std::int64_t each = json.integer_or("moe_shared_expert_intermediate_size", moe.ffn, 1, max_ffn);
    moe.shared_ffn = each * json.integer_or(spelled(json, "num_shared_experts", "n_shared_experts"), 0, 0, 1024);
    model::Router& router = moe.router;
    const bool sigmoid = json.string_or("score_function", fallback_scoring) == "sigmoid";
    router.scoring = sigmoid ? model::Scoring::sigmoid : model::Scoring::softmax;
    router.normalize = says(json, spelled(json, "norm_topk_prob", "moe_renormalize"), true);
    router.scale = json.number_or("routed_scaling_factor", 1.0, 0.0, 1e6);
    router.groups = integer_or(json, spelled(json, "n_group", "num_expert_group"), 1, 1, max_experts);
    router.groups_kept = integer_or(json, "topk_group", 1, 1, max_experts);
    router.group_score_top = 2;
    return moe;
}

model::Attention read_ling_attention(const JsonObject& json, const model::Model& model) {
    model::Attention attention = read_gqa(json, model, 1.0);
    attention.qk_norm = json.boolean_or("use_qk_norm", false);
    attention.qkv_bias = json.boolean_or("use_qkv_bias", false);
    attention.out_bias = json.boolean_or("use_bias", false);
    return attention;
}

// The last layer of each group sees everything and, but for Ling 3, so do those behind the last whole group.
std::vector<bool> linear_layers(const JsonObject& json, int layers, bool rest_is_linear) {
    const int group = integer_or(json, "layer_group_size", 1, 1, max_layers);
    const int whole = rest_is_linear ? layers : layers / group * group;
    std::vector<bool> linear;
    for (int layer = 0; layer < layers; ++layer) linear.push_back(layer < whole && (layer + 1) % group != 0);
    return layers_of_type(json, "linear_attention", layers, linear);
}

} // namespace

void read_bailing(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    if (!says(json, "use_rmsnorm", true)) json.refuse_value("use_rmsnorm", "only true is known");
    model::LayerKind dense;
    dense.attention = read_ling_attention(json, model);
    dense.activation = read_activation(json, "silu");
    model::LayerKind sparse = dense;
    sparse.moe = read_ling_experts(json, "softmax");
    sparse.moe->router.expert_bias = json.boolean_or("moe_router_enable_expert_bias", false);
    const int layers = layer_count(json);
    const int first = integer_or(json, "first_k_dense_replace", 0, 0, max_layers);
    if (first > 0) dense.dense_ffn = ffn(json, "intermediate_size");
    for (int layer = 0; layer < layers; ++layer) add_layer(model, layer < first ? dense : sparse);
    repeat_last_as_mtp(json, model);
}

// Ling-linear and Ling 2.5 with lightning attention, Ling 3 with Kimi delta attention.
void read_bailing_hybrid(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 6e6);
    model.rope_interleaved = says(json, "rope_interleave", json.has("kv_lora_rank"));
    // Transformers has words of its own for what linear attention shares with the other in published files.
    const auto size = [&](const char* own, const char* shared, std::int64_t high) {
        return integer(json, json.has(own) ? own : shared, high);
    };
    const int heads = size("linear_num_heads", "num_attention_heads", max_heads);
    const int width = size("linear_head_dim", "head_dim", max_dim);
    const bool delta = model.architecture == "BailingHybridForCausalLM";
    model::Attention full = json.has("kv_lora_rank") ? read_mla(json) : read_ling_attention(json, model);
    if (delta) full.opaque = opaque_part("a gate of each head", {model.hidden * full.heads});
    const std::int64_t norms = std::int64_t{heads} * width + (json.boolean_or("use_qk_norm", false) ? 2 * width : 0);
    const int taps = integer_or(json, spelled(json, "linear_conv_kernel_dim", "short_conv_kernel_size"), 4, 1, 1024);
    const bool whole = says(json, "no_kda_lora", true);
    const model::Attention linear =
        opaque_mixer(delta ? delta_by_channel(model.hidden, {heads, width, taps, whole, whole})
                           : lightning_attention(model.hidden, heads, width, norms));
    pass_over(json,
              {"group_norm_size", "linear_silu", "use_linear_silu", "linear_rope", "use_linear_gqa", "rotary_dim",
               "partial_rotary_factor", "kda_safe_gate", "kda_lower_bound", "gated_attention_proj_granularity_type",
               "linear_conv_kernel_dim", "short_conv_kernel_size", "num_mtp_layers", "moe_router_enable_expert_bias"});
    model::Moe moe = read_ling_experts(json, "sigmoid");
    moe.router.expert_bias = true;
    const std::vector<bool> is_linear = linear_layers(json, layer_count(json), delta),
                            sparse = layers_with_experts(json, delta ? 2 : 0);
    for (std::size_t layer = 0; layer < is_linear.size(); ++layer) {
        model::LayerKind kind;
        kind.activation = read_activation(json, "silu");
        kind.attention = is_linear[layer] ? linear : full;
        if (sparse[layer])
            kind.moe = moe;
        else
            kind.dense_ffn = ffn(json, "intermediate_size");
        add_layer(model, kind);
    }
    repeat_last_as_mtp(json, model, spelled(json, "num_nextn_predict_layers", "num_mtp_layers"));
}

// MiniMax-01 and M1: lightning attention in seven layers of eight, experts in all.
void read_minimax_01(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 1e6);
    const int layers = layer_count(json);
    model::LayerKind kind;
    kind.activation = read_activation(json, "silu");
    const model::Attention full = [&] {
        model::Attention attention = read_gqa(json, model, 1.0);
        attention.rope_dim = integer_or(json, "rotary_dim", attention.rope_dim, 0, max_dim);
        return attention;
    }();
    model::Moe& moe = kind.moe.emplace();
    moe.experts = integer(json, "num_local_experts", max_experts);
    moe.top_k = integer(json, "num_experts_per_tok", max_experts);
    moe.ffn = ffn(json, "intermediate_size");
    moe.shared_ffn = json.integer_or("shared_intermediate_size", 0, 0, max_ffn);
    moe.router.softmax_after_top_k = true;
    std::vector<bool> linear;
    for (int layer = 0; layer < layers; ++layer) linear.push_back((layer + 1) % 2 != 0);
    if (json.has("attn_type_list")) {
        linear = flags(json, "attn_type_list", layers);
        linear.flip();
    }
    pass_over(json,
              {"postnorm", "shared_moe_mode", "block_size", "layernorm_full_attention_alpha",
               "layernorm_full_attention_beta", "layernorm_linear_attention_alpha", "layernorm_linear_attention_beta",
               "layernorm_mlp_alpha", "layernorm_mlp_beta", "full_attn_alpha_factor", "full_attn_beta_factor",
               "linear_attn_alpha_factor", "linear_attn_beta_factor", "mlp_alpha_factor", "mlp_beta_factor"});
    const model::Attention lightning = opaque_mixer(
        lightning_attention(model.hidden, full.heads, full.qk_dim, std::int64_t{full.heads} * full.qk_dim));
    for (const bool here : layers_of_type(json, "linear_attention", layers, linear)) {
        kind.attention = here ? lightning : full;
        add_layer(model, kind);
    }
}

} // namespace moe::families
