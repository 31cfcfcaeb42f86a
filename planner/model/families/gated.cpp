// Families of 2026 whose layers that see everything turn nothing, with parts of their own beside: Beam and Muse Spark
// with gates of attention's output, LARA mini with gated delta nets. Counted and priced, not trained.
#include "planner/model/families/families.hpp"
#include "planner/model/families/opaque_parts.hpp"
#include "planner/model/families/parts.hpp"

#include <algorithm>

namespace moe::families {

// Beam: gates of the output with a bias for each head, norms on both sides, windows in five layers of six; those that
// see everything turn nothing.
void read_beam(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    model.post_norms = true;
    const bool silent = !json.states("final_logit_softcapping");
    if (silent || json.has("final_logit_softcapping"))
        model.logit_cap = json.number_or("final_logit_softcapping", 30.0, 1e-6, 1e6);
    const int layers = layer_count(json);
    model::Attention full = read_gqa(json, model);
    full.qkv_bias = full.out_bias = json.boolean_or("attention_bias", false);
    full.qk_norm = full.output_gate = true;
    full.opaque = opaque_part("biases of gates", {0, full.heads});
    model::Attention window = full;
    full.rope_dim = 0;
    window.window = json.integer_or("sliding_window", 512, 1, max_window);
    window.rope = rope_of_type(json, "sliding_attention", 10000.0);
    model::Moe moe = read_experts(json, "num_experts", "", 0);
    moe.router = selecting_router(json, "norm_topk_prob", "routed_scaling_factor", 2.5);
    moe.router.groups = integer_or(json, "n_group", 8, 1, max_experts);
    moe.router.groups_kept = integer_or(json, "topk_group", 4, 1, max_experts);
    std::vector<bool> slides = every(6, layers);
    slides.flip();
    slides.back() = false;
    const std::vector<bool> sliding = layers_of_type(json, "sliding_attention", layers, slides),
                            sparse =
                                json.is_array("mlp_layer_types") ? sparse_of_types(json, layers) : after(3, layers);
    for (std::size_t layer = 0; layer < sparse.size(); ++layer) {
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

// Muse Spark: experts that work in a latent between norms, a gate of each sum with the residual stream.
void read_muse_spark(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 500000.0);
    model.logit_cap = json.number_or("final_logit_softcapping", 20.0, 1e-6, 1e6);
    model.logit_scale = json.number_or("output_multiplier", 0.1767766952966369, 1e-9, 1e6);
    pass_over(json, {"qk_scale_factor", "post_norm_eps", "residual_gate_temperature"});
    const int layers = layer_count(json);
    model::Attention full = read_gqa(json, model);
    full.qkv_bias = full.out_bias = json.boolean_or("attention_bias", false);
    full.qk_norm = full.plain_qk_norm = full.output_gate = true;
    // A norm behind the MLP and the two gates.
    full.opaque = opaque_part("gates of sums", {0, 3 * model.hidden});
    model::Attention window = full;
    window.window = json.integer_or("sliding_window", 2048, 1, max_window);
    model::Moe moe;
    moe.experts = integer(json, "num_local_experts", max_experts);
    moe.top_k = integer(json, "num_experts_per_tok", max_experts);
    moe.ffn = ffn(json, "moe_intermediate_size");
    moe.latent = json.integer_or("moe_hidden_size", 4096, 1, max_hidden);
    moe.router.scoring = model::Scoring::sigmoid;
    moe.router.expert_bias = moe.router.normalize = true;
    moe.router.scale = json.number_or("routed_scaling_factor", 1.0, 0.0, 1e6);
    std::vector<bool> slides = one_of_each(4, (layers - 1) % 4, layers);
    slides.flip();
    std::vector<double> bases(slides.size(), model.rope_theta);
    for (std::size_t layer = 0; layer < slides.size(); ++layer)
        if (!slides[layer]) bases[layer] = 0.0;
    if (json.has("layer_rope_theta")) bases = json.numbers("layer_rope_theta", 0.0, 1e12);
    check_length(json, "layer_rope_theta", bases.size(), layers);
    const std::vector<bool> sliding = layers_of_type(json, "sliding_attention", layers, slides),
                            sparse = json.is_array("mlp_layer_types")
                                         ? sparse_of_types(json, layers)
                                         : std::vector<bool>(static_cast<std::size_t>(layers), true);
    for (std::size_t layer = 0; layer < sparse.size(); ++layer) {
        model::LayerKind kind;
        kind.activation = read_activation(json, "silu");
        kind.attention = sliding[layer] ? window : full;
        if (bases[layer] == 0.0) kind.attention.rope_dim = 0;
        if (sparse[layer]) {
            kind.moe = moe;
            join(kind.attention.opaque, opaque_part("norms of latents", {0, 2 * moe.latent}));
        } else {
            kind.dense_ffn = ffn(json, "intermediate_size");
        }
        add_layer(model, kind);
    }
}

// LARA mini: gated delta nets, windows and full layers in turns, experts in all.
void read_lara_mini(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    model.tied_embeddings = says(json, "tie_word_embeddings", true);
    const int layers = layer_count(json);
    model::Attention full = read_gqa(json, model);
    full.qkv_bias = full.out_bias = json.boolean_or("attention_bias", false);
    full.qk_norm = true;
    model::Attention window = full;
    full.rope_dim = 0;
    window.window = json.integer_or("sliding_window", 512, 1, max_window);
    model::Moe moe = read_experts(json, "num_experts", "", 0);
    moe.shared_ffn = json.integer_or("shared_expert_intermediate_size", 512, 0, max_ffn);
    moe.router.normalize = says(json, "norm_topk_prob", true);
    const std::vector<bool> first = one_of_each(5, 0, layers), third = one_of_each(5, 2, layers),
                            fourth = one_of_each(5, 3, layers);
    std::vector<bool> linear(first.size()), slides(first.size());
    for (std::size_t layer = 0; layer < first.size(); ++layer) {
        linear[layer] = first[layer] || third[layer];
        slides[layer] = !linear[layer] && !fourth[layer];
    }
    linear = layers_of_type(json, "linear_attention", layers, linear);
    slides = layers_of_type(json, "sliding_attention", layers, slides);
    for (std::size_t layer = 0; layer < linear.size(); ++layer) {
        model::LayerKind kind;
        kind.activation = read_activation(json, "silu");
        kind.moe = moe;
        kind.attention = slides[layer] ? window : full;
        if (linear[layer]) kind.attention = read_gated_delta(json);
        add_layer(model, kind);
    }
    model.not_executable = "LaraMiniForCausalLM: weights under names of their own are not read yet";
}

} // namespace moe::families
