// Granite 4: layers of a Mamba-2 mixer or attention, each with routed experts and a shared MLP, or the latter alone;
// and Granite-MoE with windows and sinks.
#include "planner/base/error.hpp"
#include "planner/model/families/families.hpp"
#include "planner/model/families/parts.hpp"

#include <algorithm>
#include <tuple>

namespace moe::families {
namespace {

model::Attention read_mamba(const JsonObject& json, const model::Model& model) {
    model::Attention mamba;
    mamba.kind = model::AttentionKind::mamba;
    mamba.value_heads = integer_or(json, "mamba_n_heads", 128, 1, max_heads);
    const std::int64_t inner = model.hidden * integer_or(json, "mamba_expand", 2, 1, 64);
    const bool stated = json.has("mamba_d_head") && !json.is_string("mamba_d_head"); // A string says "auto".
    if (inner % mamba.value_heads != 0)
        json.refuse_value("mamba_n_heads", fmt::format("must divide mamba_expand * hidden_size = {}", inner));
    mamba.value_dim = stated ? integer(json, "mamba_d_head", max_dim) : static_cast<int>(inner / mamba.value_heads);
    if (static_cast<std::int64_t>(mamba.value_heads) * mamba.value_dim != inner)
        json.refuse_value(
            "mamba_d_head",
            fmt::format("times mamba_n_heads = {} must be mamba_expand * hidden_size = {}", mamba.value_heads, inner));
    mamba.key_heads = integer_or(json, "mamba_n_groups", 1, 1, max_heads);
    mamba.key_dim = integer_or(json, "mamba_d_state", 256, 1, max_dim);
    mamba.conv_kernel = integer_or(json, "mamba_d_conv", 4, 1, 1024);
    mamba.scan_chunk = integer_or(json, "mamba_chunk_size", 256, 1, 1 << 16);
    if (json.has("time_step_limit")) std::tie(mamba.step_min, mamba.step_max) = json.interval("time_step_limit");
    if (mamba.value_heads % mamba.key_heads != 0)
        json.refuse_value("mamba_n_heads", fmt::format("must be a multiple of mamba_n_groups = {}", mamba.key_heads));
    if (read_activation(json, "silu") != model::Activation::silu)
        json.refuse_value("hidden_act", "only silu is known of convolutions");
    if (!says(json, "mamba_conv_bias", true))
        json.refuse_value("mamba_conv_bias", "only convolutions with a bias are known");
    if (json.boolean_or("mamba_proj_bias", false))
        json.refuse_value("mamba_proj_bias", "only projections without a bias are known");
    return mamba;
}

} // namespace

// All layers are Mamba's without layer_types. Attention turns nothing unless position_embedding_type says "rope".
void read_granite_hybrid(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    must_be(json, "normalization_function", "rmsnorm");
    pass_over(json, {"num_attention_heads"}); // where all layers are Mamba's
    const int layers = layer_count(json);
    const std::vector<bool> all(static_cast<std::size_t>(layers), true);
    std::vector<bool> is_mamba = layers_of_type(json, "mamba", layers, all);
    if (json.is_array("layer_types")) { // Transformers 5 says linear_attention.
        const std::vector<bool> is_linear = layers_of_type(json, "linear_attention", layers, all);
        for (std::size_t layer = 0; layer < is_mamba.size(); ++layer)
            is_mamba[layer] = is_mamba[layer] || is_linear[layer];
    }
    const bool rotates = json.string_or("position_embedding_type", "nope") == "rope";
    model::LayerKind kind;
    kind.activation = read_activation(json, "silu");
    const std::int64_t shared = json.integer_or("shared_intermediate_size", 1024, 0, max_ffn);
    if (json.integer_or("num_local_experts", 8, 0, max_experts) > 0) {
        model::Moe& moe = kind.moe.emplace();
        moe.experts = integer_or(json, "num_local_experts", 8, 1, max_experts);
        moe.top_k = integer_or(json, "num_experts_per_tok", 2, 1, max_experts);
        moe.ffn = ffn(json, "intermediate_size");
        moe.shared_ffn = shared;
        moe.router.softmax_after_top_k = true;
    } else {
        kind.dense_ffn = shared;
    }
    const double score_factor = read_granite_factors(json, model);
    model::LayerKind mamba = kind, attention = kind;
    if (std::find(is_mamba.begin(), is_mamba.end(), true) != is_mamba.end()) mamba.attention = read_mamba(json, model);
    if (std::find(is_mamba.begin(), is_mamba.end(), false) != is_mamba.end()) {
        attention.attention = read_gqa(json, model, rotates ? std::optional<double>() : 0.0);
        attention.attention.scale = score_factor;
        attention.attention.qkv_bias = attention.attention.out_bias = json.boolean_or("attention_bias", false);
    }
    for (const bool here : is_mamba) add_layer(model, here ? mamba : attention);
}

// Bamba: Granite 4's mixer with a dense MLP in every layer; attention in the layers of attn_layer_indices turns a half.
void read_bamba(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 10000.0);
    refuse_experts(json, model);
    model::LayerKind kind;
    kind.activation = read_activation(json, "silu");
    kind.dense_ffn = ffn(json, "intermediate_size");
    kind.mlp_bias = json.boolean_or("mlp_bias", false);
    model::LayerKind mamba = kind;
    mamba.attention = read_mamba(json, model);
    kind.attention = read_gqa(json, model, 0.5);
    kind.attention.qkv_bias = kind.attention.out_bias = json.boolean_or("attention_bias", false);
    if (json.has("attn_rotary_emb")) kind.attention.rope_dim = integer(json, "attn_rotary_emb", max_dim);
    std::vector<bool> is_mamba(static_cast<std::size_t>(layer_count(json)), true);
    if (json.has("attn_layer_indices"))
        for (const std::int64_t layer : json.integers("attn_layer_indices", 0, layer_count(json) - 1))
            is_mamba[static_cast<std::size_t>(layer)] = false;
    for (const bool here : is_mamba) add_layer(model, here ? mamba : kind);
}

// Granite-MoE with sinks and, in most layers, a window. Layers may have a base of rotation each; 0: they turn nothing.
void read_granite_swa(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    const int layers = layer_count(json);
    std::vector<bool> fallback;
    for (int layer = 0; layer < layers; ++layer) fallback.push_back(layer % 4 != 0);
    const std::vector<bool> sliding = layers_of_type(json, "sliding_attention", layers, fallback);
    std::vector<double> bases(static_cast<std::size_t>(layers), model.rope_theta);
    if (json.has("layer_rope_theta")) bases = json.numbers("layer_rope_theta", 0.0, 1e12);
    check_length(json, "layer_rope_theta", bases.size(), layers);
    model::LayerKind kind;
    kind.attention = read_gqa(json, model);
    kind.attention.sinks = true;
    kind.attention.qkv_bias = kind.attention.out_bias = json.boolean_or("attention_bias", false);
    kind.attention.scale = read_granite_factors(json, model);
    kind.activation = read_activation(json, "silu");
    model::Moe& moe = kind.moe.emplace();
    moe.experts = integer_or(json, "num_local_experts", 8, 1, max_experts);
    moe.top_k = integer_or(json, "num_experts_per_tok", 2, 1, max_experts);
    moe.ffn = ffn(json, "intermediate_size");
    moe.shared_ffn = json.integer_or("shared_intermediate_size", 0, 0, max_ffn);
    moe.router.softmax_after_top_k = true;
    const int turned = kind.attention.rope_dim;
    for (std::size_t layer = 0; layer < sliding.size(); ++layer) {
        kind.attention.window = sliding[layer] ? json.integer_or("sliding_window", 128, 1, max_window) : 0;
        kind.attention.rope_dim = bases[layer] > 0.0 ? turned : 0;
        kind.attention.rope = std::nullopt;
        if (bases[layer] > 0.0 && bases[layer] != model.rope_theta)
            kind.attention.rope = model::Rope{bases[layer], model.rope_scaling};
        add_layer(model, kind);
    }
}

} // namespace moe::families
