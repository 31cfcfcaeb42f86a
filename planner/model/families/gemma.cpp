// Gemma 4 without embeddings by layer: layers of windows, and layers that see everything with wider heads; norms on
// both sides; experts beside an MLP.
#include "planner/base/error.hpp"
#include "planner/model/families/families.hpp"
#include "planner/model/families/parts.hpp"

#include <cmath>

namespace moe::families {
namespace {

// Without rope_parameters layers that see everything turn a quarter of their pairs of columns.
model::Rope read_rotation(const JsonObject& json, const char* type, bool sees_all) {
    if (const auto own = rope_of_type(json, type, 10000.0)) return *own;
    model::Rope rope{sees_all ? 1e6 : 1e4, {}};
    if (sees_all) rope.scaling.type = "proportional", rope.scaling.share = 0.25;
    return rope;
}

// Refuses what a layer of the smaller models does that this structure has no place for.
void refuse_others(const JsonObject& json) {
    if (json.integer_or("hidden_size_per_layer_input", 256, 0, max_hidden) > 0)
        json.refuse_value("hidden_size_per_layer_input", "embeddings by layer are not supported");
    if (json.integer_or("num_kv_shared_layers", 0, 0, max_layers) > 0)
        json.refuse_value("num_kv_shared_layers", "keys and values of other layers are not supported");
    if (json.has("use_bidirectional_attention") && json.string("use_bidirectional_attention") == "all")
        json.refuse_value("use_bidirectional_attention", "only causal attention is known");
}

} // namespace

// The MLP stands where others have a shared expert, under norms of its own as the experts are.
void read_gemma4(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    refuse_others(json);
    model.tied_embeddings = says(json, "tie_word_embeddings", true);
    model.post_norms = true;
    model.embedding_scale = std::sqrt(static_cast<double>(model.hidden));
    if (json.has("final_logit_softcapping")) model.logit_cap = json.number("final_logit_softcapping", 1e-6, 1e6);
    const int layers = layer_count(json);
    if (!json.has("layer_types")) refuse("{}: field \"layer_types\" is missing", json.place());
    check_length(json, "layer_types", json.strings("layer_types").size(), layers);
    std::vector<bool> sliding = layers_of_type(json, "sliding_attention", layers, {});
    sliding.back() = false; // as the class has it, whatever the list says
    pass_over(json, {"vocab_size_per_layer_input"});
    integer(json, "head_dim", max_dim); // The field has no default that follows from other sizes.
    model::Attention window = read_gqa(json, model);
    window.qk_norm = window.value_norm = true;
    window.scale = 1.0;
    window.qkv_bias = window.out_bias = json.boolean_or("attention_bias", false);
    model::Attention full = window;
    window.rope_dim = window.qk_dim;
    window.rope = read_rotation(json, "sliding_attention", false);
    window.window = json.integer("sliding_window", 1, max_window);
    std::vector<bool> sees_all = sliding;
    sees_all.flip();
    if (json.is_object("per_layer_config")) { // Transformers 5.24 names what differs layer by layer.
        full.qk_dim = size_of_layers(json, "head_dim", sees_all, full.qk_dim, max_dim);
        full.kv_heads = size_of_layers(json, "num_key_value_heads", sees_all, full.kv_heads, max_heads);
    } else {
        full.qk_dim = integer(json, "global_head_dim", max_dim);
    }
    full.v_dim = full.qk_dim;
    full.rope_dim = full.qk_dim;
    full.rope = read_rotation(json, "full_attention", true);
    full.k_eq_v = json.boolean_or("attention_k_eq_v", false);
    if (full.k_eq_v && full.qkv_bias)
        json.refuse_value("attention_bias", "must be false where attention_k_eq_v is true");
    if (full.k_eq_v) full.kv_heads = integer_or(json, "num_global_key_value_heads", full.kv_heads, 1, max_heads);
    model::LayerKind kind;
    kind.activation = read_activation(json, "gelu_pytorch_tanh");
    kind.output_scale = true;
    if (json.boolean_or("enable_moe_block", false)) {
        model::Moe& moe = kind.moe.emplace();
        moe.experts = integer(json, "num_experts", max_experts);
        moe.top_k = integer(json, "top_k_experts", max_experts);
        moe.ffn = ffn(json, "moe_intermediate_size");
        moe.shared_ffn = ffn(json, "intermediate_size");
        moe.branch_norms = true;
        moe.router.normalize = true;
    } else {
        kind.dense_ffn = ffn(json, "intermediate_size");
    }
    for (const bool here : sliding) {
        kind.attention = here ? window : full;
        add_layer(model, kind);
    }
}

} // namespace moe::families
