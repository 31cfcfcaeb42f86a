// Layers that see a window or everything, and experts in Qwen3-MoE's words: Mellum 2, Flint and Poolside's Laguna.
#include "planner/model/families/families.hpp"
#include "planner/model/families/parts.hpp"

#include <algorithm>

namespace moe::families {
namespace {

model::Attention laguna_attention(const JsonObject& json, const model::Model& model) {
    model::Attention attention = read_gqa(json, model);
    attention.qk_norm = true;
    attention.qkv_bias = attention.out_bias = json.boolean_or("attention_bias", false);
    return attention;
}

// Adds a layer for each entry of both lists.
void add_layers(const JsonObject& json, model::Model& model, const std::vector<bool>& sliding,
                const std::vector<bool>& sparse, const model::Attention& full, const model::Attention& window,
                const model::Moe& moe) {
    for (std::size_t layer = 0; layer < sliding.size(); ++layer) {
        model::LayerKind kind;
        kind.activation = read_activation(json, "silu");
        kind.attention = sliding[layer] ? window : full;
        if (sparse[layer])
            kind.moe = moe;
        else
            kind.dense_ffn = ffn(json, "intermediate_size");
        add_layer(model, kind);
    }
}

} // namespace

// Layers with a window turn by a base of their own. The modules of multi-token prediction stand beside the class.
void read_mellum(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    for (const char* depths : {"num_nextn_predict_layers", "num_mtp_layers"})
        if (integer_or(json, depths, 0, 0, 64) > 0)
            json.refuse_value(depths, "multi-token prediction of Mellum is not known: must be 0 or null");
    const int layers = layer_count(json);
    const std::vector<bool> none(static_cast<std::size_t>(layers)), all = after(0, layers);
    const std::vector<bool> sliding = layers_of_type(json, "sliding_attention", layers, none);
    const std::vector<bool> sparse = json.is_array("mlp_layer_types") ? sparse_of_types(json, layers) : all;
    model::Attention full = laguna_attention(json, model), window = full;
    full.rope = rope_of_type(json, "full_attention", 500000.0).value_or(model::Rope{500000.0, {}});
    window.rope = rope_of_type(json, "sliding_attention", 10000.0).value_or(model::Rope{10000.0, {}});
    full.rope_dim = static_cast<int>(full.qk_dim * rotary_share(json, "full_attention", 1.0));
    window.rope_dim = static_cast<int>(full.qk_dim * rotary_share(json, "sliding_attention", 1.0));
    window.window = json.integer_or("sliding_window", 1024, 1, max_window);
    const bool own_name = json.has("num_local_experts"); // Transformers 5 writes it so.
    model::Moe moe = read_experts(json, own_name ? "num_local_experts" : "num_experts", "", 0);
    moe.router.normalize = says(json, "norm_topk_prob", true);
    add_layers(json, model, sliding, sparse, full, window, moe);
}

// Sinks everywhere; layers that see everything turn nothing. Experts are chosen and weighed by a sigmoid without bias,
// and the shared expert has no gate.
void read_flint(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    const int layers = layer_count(json);
    std::vector<bool> fallback;
    for (int layer = 0; layer < layers; ++layer)
        fallback.push_back(layer >= 2 && layer % 4 != 1 && layer != layers - 1);
    const std::vector<bool> sliding = layers_of_type(json, "sliding_attention", layers, fallback);
    std::vector<bool> sparse;
    const int step = integer_or(json, "decoder_sparse_step", 1, 1, max_layers);
    for (int layer = 0; layer < layers; ++layer) sparse.push_back((layer + 1) % step == 0);
    std::vector<std::int64_t> dense{0, std::min(1, layers - 1)};
    if (json.has("mlp_only_layers")) dense = json.integers("mlp_only_layers", 0, layers - 1);
    for (const std::int64_t layer : dense) sparse[static_cast<std::size_t>(layer)] = false;
    model::Attention full = laguna_attention(json, model);
    full.sinks = true;
    model::Attention window = full;
    window.window = json.integer_or("sliding_window", 513, 1, max_window);
    full.rope_dim = 0;
    model::Moe moe = read_experts(json, "num_experts", "", 0);
    moe.shared_ffn = json.integer("shared_expert_intermediate_size", 0, max_ffn);
    moe.router.scoring = model::Scoring::sigmoid;
    moe.router.normalize = says(json, "norm_topk_prob", true);
    add_layers(json, model, sliding, sparse, full, window, moe);
}

namespace {

// One gate per head, or one per column of each.
void read_laguna_gate(const JsonObject& json, model::Attention& attention) {
    const std::string key = "gating";
    if (!json.is_string(key)) {
        if (!says(json, key, true)) json.refuse_value(key, "must be true, per-head or per-element");
        attention.head_gate = true;
        return;
    }
    const std::string gate = json.string(key);
    if (gate != "per-head" && gate != "per-element") json.refuse_value(key, "must be true, per-head or per-element");
    (gate == "per-head" ? attention.head_gate : attention.output_gate) = true;
}

} // namespace

// Poolside's Laguna: every layer may have a number of query heads of its own.
void read_laguna(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 500000.0);
    if (json.boolean_or("moe_apply_router_weight_on_input", false))
        json.refuse_value("moe_apply_router_weight_on_input", "only false is known");
    const int layers = layer_count(json);
    const std::vector<bool> none(static_cast<std::size_t>(layers));
    const std::vector<bool> sliding = layers_of_type(json, "sliding_attention", layers, none);
    std::vector<bool> sparse = after(json.has("mlp_only_layers") ? 0 : 1, layers);
    if (json.has("mlp_layer_types")) {
        sparse = sparse_of_types(json, layers);
    } else if (json.has("mlp_only_layers")) { // The field is as first published.
        if (json.integer_or("decoder_sparse_step", 1, 1, max_layers) != 1)
            json.refuse_value("decoder_sparse_step", "only 1 is known");
        for (const std::int64_t layer : json.integers("mlp_only_layers", 0, layers - 1))
            sparse[static_cast<std::size_t>(layer)] = false;
    }
    std::vector<std::int64_t> heads(static_cast<std::size_t>(layers));
    integer(json, "head_dim", max_dim); // The field has no default that follows from other sizes.
    model::Attention attention = read_gqa(json, model, 1.0);
    std::fill(heads.begin(), heads.end(), attention.heads);
    if (json.has("num_attention_heads_per_layer")) {
        heads = json.integers("num_attention_heads_per_layer", 1, max_heads);
        check_length(json, "num_attention_heads_per_layer", heads.size(), layers);
    }
    attention.qk_norm = true;
    attention.qkv_bias = attention.out_bias = json.boolean_or("attention_bias", false);
    read_laguna_gate(json, attention);
    attention.softplus_gate = true;
    pass_over(json, {"sliding_window"}); // and the rotation of windows, where no layer has one
    if (json.is_object("rope_parameters")) pass_over(json.object("rope_parameters"), {"sliding_attention"});
    const double sliding_base = json.has("rope_theta") ? model.rope_theta : 10000.0; // where no rope_parameters say one
    model::Moe moe = read_experts(json, "num_experts", "", 0);
    moe.shared_ffn = json.integer_or("shared_expert_intermediate_size", 512, 0, max_ffn);
    moe.router = selecting_router(json, "norm_topk_prob", "moe_routed_scaling_factor", 1.0);
    for (std::size_t layer = 0; layer < heads.size(); ++layer) {
        model::LayerKind kind;
        kind.activation = read_activation(json, "silu");
        kind.attention = attention;
        kind.attention.heads = static_cast<int>(heads[layer]);
        const char* type = sliding[layer] ? "sliding_attention" : "full_attention";
        kind.attention.rope = rope_of_type(json, type, model.rope_theta);
        if (sliding[layer] && !kind.attention.rope) kind.attention.rope = model::Rope{sliding_base, {}};
        kind.attention.rope_dim =
            static_cast<int>(attention.qk_dim * rotary_share(json, type, sliding[layer] ? 1.0 : 0.5));
        if (sliding[layer]) {
            kind.attention.window = json.integer_or("sliding_window", 512, 1, max_window);
            kind.attention.sinks = json.boolean_or("swa_attention_sink_enabled", false);
        }
        if (sparse[layer])
            kind.moe = moe;
        else
            kind.dense_ffn = ffn(json, "intermediate_size");
        add_layer(model, kind);
    }
    if (json.number_or("moe_router_logit_softcapping", 0.0, 0.0, 1e6) > 0.0)
        model.not_executable = "moe_router_logit_softcapping: a bound of the router's logits is not trained yet";
}

} // namespace moe::families
