// Mixers that are priced alone among layers of attention (LFM2, Jamba), beside attention (Falcon-H1), or without any
// (Mamba, Falcon Mamba). Sources: configuration classes and modules of transformers 5.24.
#include "planner/base/error.hpp"
#include "planner/model/families/families.hpp"
#include "planner/model/families/opaque_parts.hpp"
#include "planner/model/families/parts.hpp"

#include <algorithm>

namespace moe::families {
namespace {

// The columns of the latent of steps: a number, or "auto" for a sixteenth of the hidden width.
int step_rank(const JsonObject& json, const char* key, std::int64_t hidden) {
    const bool stated = json.has(key) && !json.is_string(key);
    if (json.is_string(key)) must_be(json, key, "auto");
    return stated ? integer(json, key, max_hidden) : static_cast<int>((hidden + 15) / 16);
}

// LFM2's dense width, which the class cuts by a third and rounds up.
std::int64_t lfm2_width(const JsonObject& json) {
    const std::int64_t width = ffn(json, json.has("block_ff_dim") ? "block_ff_dim" : "intermediate_size");
    const double factor = json.number_or("block_ffn_dim_multiplier", 1.0, 1e-3, 1e3);
    const std::int64_t unit = json.integer_or("block_multiple_of", 256, 1, max_ffn);
    if (!says(json, "block_auto_adjust_ff_dim", true)) return width;
    const std::int64_t two_thirds = 2 * width / 3;
    const auto cut = static_cast<std::int64_t>(factor * static_cast<double>(two_thirds));
    return (cut + unit - 1) / unit * unit;
}

// Layers of LFM2 that are attention; its list of them stands for a list of types.
std::vector<bool> lfm2_attention(const JsonObject& json, int layers) {
    if (json.is_array("layer_types")) return layers_that_are(json, "layer_types", "full_attention", "conv", layers);
    std::vector<bool> attention(static_cast<std::size_t>(layers), !json.has("full_attn_idxs"));
    if (json.has("full_attn_idxs"))
        for (const std::int64_t layer : json.integers("full_attn_idxs", 0, layers - 1))
            attention[static_cast<std::size_t>(layer)] = true;
    return attention;
}

} // namespace

void read_lfm2(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 1e6);
    model.tied_embeddings = says(json, json.states("tie_embedding") ? "tie_embedding" : "tie_word_embeddings", true);
    pass_over(json, {"tie_word_embeddings", "full_attn_idxs", "block_dim", "block_mlp_init_scale", "block_norm_eps",
                     "block_out_init_scale", "block_use_swiglu", "block_use_xavier_init", "conv_dim", "conv_dim_out",
                     "conv_use_xavier_init", "use_pos_enc", "num_heads", "theta"});
    const int layers = layer_count(json);
    model::Attention attention = read_gqa(json, model);
    attention.qk_norm = true;
    const model::Attention convolution = opaque_mixer(short_convolution(
        model.hidden, integer_or(json, "conv_L_cache", 3, 1, 1024), json.boolean_or("conv_bias", false)));
    const bool routed = model.architecture == "Lfm2MoeForCausalLM";
    model::Moe moe;
    if (routed) {
        moe = read_experts(json, "num_experts", "", 0);
        moe.router.scoring = model::Scoring::sigmoid;
        moe.router.normalize = says(json, "norm_topk_prob", true);
        moe.router.scale = json.number_or("routed_scaling_factor", 1.0, 0.0, 1e6);
        moe.router.expert_bias = says(json, "use_expert_bias", true);
    }
    const int dense = routed ? integer_or(json, "num_dense_layers", 2, 0, max_layers) : layers;
    const std::int64_t width = routed ? ffn(json, "intermediate_size") : lfm2_width(json);
    const std::vector<bool> attends = lfm2_attention(json, layers), sparse = after(dense, layers);
    for (std::size_t layer = 0; layer < attends.size(); ++layer) {
        model::LayerKind kind;
        kind.attention = attends[layer] ? attention : convolution;
        if (sparse[layer])
            kind.moe = moe;
        else
            kind.dense_ffn = width;
        add_layer(model, kind);
    }
    model.not_executable = "conv_L_cache: short convolutions as layers are only priced, not trained yet";
}

// Jamba: attention that turns nothing in one layer of each period, Mamba with norms of its steps in the others.
void read_jamba(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    const int layers = layer_count(json);
    const model::Attention attention = read_gqa(json, model, 0.0);
    Mamba1 parts;
    parts.inner = model.hidden * integer_or(json, "mamba_expand", 2, 1, 64);
    parts.state = integer_or(json, "mamba_d_state", 16, 1, max_dim);
    parts.taps = integer_or(json, "mamba_d_conv", 4, 1, 1024);
    parts.rank = step_rank(json, "mamba_dt_rank", model.hidden);
    parts.conv_bias = says(json, "mamba_conv_bias", true);
    parts.bias = json.boolean_or("mamba_proj_bias", false);
    parts.norms = says(json, "mamba_inner_layernorms", true);
    pass_over(json, {"use_mambapy", "use_associative_scan", "layers_block_type"});
    const model::Attention mamba = opaque_mixer(mamba1(model.hidden, parts));
    model::Moe moe;
    moe.experts = integer_or(json, spelled(json, "num_experts", "num_local_experts"), 16, 1, max_experts);
    moe.top_k = integer_or(json, "num_experts_per_tok", 2, 1, max_experts);
    moe.ffn = ffn(json, "intermediate_size");
    const auto step = [&](const char* period, int fallback) {
        return integer_or(json, period, fallback, 1, max_layers);
    };
    const auto offset = [&](const char* key, int fallback) { return integer_or(json, key, fallback, 0, max_layers); };
    const std::vector<bool> attends = one_of_each(step("attn_layer_period", 8), offset("attn_layer_offset", 4), layers),
                            sparse =
                                one_of_each(step("expert_layer_period", 2), offset("expert_layer_offset", 1), layers);
    for (std::size_t layer = 0; layer < attends.size(); ++layer) {
        model::LayerKind kind;
        kind.activation = read_activation(json, "silu");
        kind.attention = attends[layer] ? attention : mamba;
        if (sparse[layer] && moe.experts > 1)
            kind.moe = moe;
        else
            kind.dense_ffn = moe.ffn;
        add_layer(model, kind);
    }
    model.not_executable = "mamba_d_state: Mamba of the first generation is only priced, not trained yet";
}

// Falcon-H1: Mamba-2 beside attention in every layer, of one norm.
void read_falcon_h1(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 10000.0);
    model.embedding_scale = json.number_or("embedding_multiplier", 1.0, 1e-9, 1e6);
    model.logit_scale = json.number_or("lm_head_multiplier", 1.0, 1e-9, 1e6);
    pass_over(json, {"attention_in_multiplier", "attention_out_multiplier", "key_multiplier", "mlp_multipliers",
                     "ssm_in_multiplier", "ssm_multipliers", "ssm_out_multiplier", "mamba_norm_before_gate",
                     "mamba_use_mlp", "mamba_d_head", "mamba_chunk_size", "mamba_expand", "mlp_expansion_factor"});
    refuse_experts(json, model);
    Mamba2 parts;
    const bool own = !json.states("mamba_d_ssm") || json.has("mamba_d_ssm");
    parts.inner = own ? json.integer_or("mamba_d_ssm", 1024, 1, max_ffn)
                      : model.hidden * integer_or(json, "mamba_expand", 2, 1, 64);
    parts.heads = integer_or(json, "mamba_n_heads", 128, 1, max_heads);
    if (parts.inner % parts.heads != 0)
        json.refuse_value("mamba_n_heads", fmt::format("must divide the inner width {}", parts.inner));
    parts.groups = integer_or(json, "mamba_n_groups", 1, 1, max_heads);
    parts.state = integer_or(json, "mamba_d_state", 256, 1, max_dim);
    parts.taps = integer_or(json, "mamba_d_conv", 4, 1, 1024);
    parts.conv_bias = says(json, "mamba_conv_bias", true);
    parts.bias = json.boolean_or("mamba_proj_bias", false);
    parts.out_bias = json.boolean_or("projectors_bias", false);
    parts.norm = json.boolean_or("mamba_rms_norm", false);
    model::LayerKind kind;
    kind.attention = read_gqa(json, model);
    kind.attention.qkv_bias = kind.attention.out_bias = json.boolean_or("attention_bias", false);
    kind.attention.opaque = mamba2(model.hidden, parts);
    kind.activation = read_activation(json, "silu");
    kind.dense_ffn = ffn(json, "intermediate_size");
    kind.mlp_bias = json.boolean_or("mlp_bias", false);
    for (int layers = layer_count(json); layers > 0; --layers) add_layer(model, kind);
}

// Mamba and Falcon Mamba, whose norms of steps have no weights: layers of a mixer alone.
void read_mamba1(const JsonObject& json, model::Model& model) {
    read_common(json, model, json.number_or("layer_norm_epsilon", 1e-5, 0.0, 1.0), 10000.0);
    model.tied_embeddings = says(json, "tie_word_embeddings", true);
    pass_over(json, {"expand", "intermediate_size", "mixer_rms_eps", "residual_in_fp32", "use_mambapy",
                     "use_associative_scan", "use_falcon_mambapy"});
    Mamba1 parts;
    // The width counts where files state it, whatever the expansion beside it says.
    parts.inner = json.integer_or("intermediate_size", model.hidden * integer_or(json, "expand", 2, 1, 64), 1, max_ffn);
    parts.state = integer_or(json, "state_size", 16, 1, max_dim);
    parts.taps = integer_or(json, "conv_kernel", 4, 1, 1024);
    parts.rank = step_rank(json, "time_step_rank", model.hidden);
    parts.conv_bias = says(json, "use_conv_bias", true);
    parts.bias = json.boolean_or("use_bias", false);
    model::LayerKind kind;
    kind.activation = read_activation(json, "silu");
    kind.attention = opaque_mixer(mamba1(model.hidden, parts));
    for (int layers = layer_count(json); layers > 0; --layers) add_layer(model, kind);
}

} // namespace moe::families
