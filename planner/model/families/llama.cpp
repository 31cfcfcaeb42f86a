// Llama and its relatives with grouped-query attention: Mistral, GPT-OSS, Llama 4, Nemotron.
#include "planner/base/error.hpp"
#include "planner/model/families/families.hpp"
#include "planner/model/families/parts.hpp"

#include <algorithm>

namespace moe::families {
namespace {

// Llama and its dense relatives.
void read_dense(const JsonObject& json, model::Model& model, const model::Attention& attention) {
    refuse_experts(json, model);
    model::LayerKind kind;
    kind.attention = attention;
    kind.dense_ffn = ffn(json, "intermediate_size");
    kind.activation = read_activation(json, "silu");
    kind.mlp_bias = json.boolean_or("mlp_bias", false);
    const int layers = layer_count(json);
    for (int layer = 0; layer < layers; ++layer) add_layer(model, kind);
}

} // namespace

void read_llama(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    model::Attention attention = read_gqa(json, model);
    attention.qkv_bias = attention.out_bias = json.boolean_or("attention_bias", false);
    read_dense(json, model, attention);
}

// Llama with a window in every layer, or none.
void read_mistral(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    model::Attention attention = read_gqa(json, model);
    if (json.has("sliding_window")) attention.window = json.integer("sliding_window", 1, max_window);
    read_dense(json, model, attention);
}

// Attention sinks and biases everywhere; every second layer sees a window; the gate is a clamped quick-GELU whatever
// hidden_act says (the field reads "silu" in the published files).
void read_gpt_oss(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 150000.0);
    if (!json.has("rope_scaling") && !json.has("rope_parameters")) { // The class scales what says nothing.
        const JsonObject own =
            JsonObject::parse(R"({"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
                                  "truncate": false})",
                              json.place());
        model.rope_scaling = read_rope(own, json, model.rope_theta).scaling;
    }
    pass_over(json, {"hidden_act", "initial_context_length"});
    model::LayerKind kind;
    kind.attention = read_gqa(json, model);
    kind.attention.qkv_bias = kind.attention.out_bias = says(json, "attention_bias", true);
    kind.attention.sinks = true;
    kind.activation = model::Activation::quick_gelu;
    kind.swiglu_limit = json.number_or("swiglu_limit", 7.0, 1e-6, 1e6);
    if (const double alpha = json.number_or("swiglu_alpha", 1.702, 0.0, 1e6); alpha != 1.702)
        refuse("{}: swiglu_alpha = {}: only 1.702 is known", json.place(), alpha);
    model::Moe moe;
    moe.experts = integer(json, "num_local_experts", max_experts);
    moe.top_k = integer(json, spelled(json, "num_experts_per_tok", "experts_per_token"), max_experts);
    moe.ffn = ffn(json, "intermediate_size");
    moe.expert_bias = true;
    moe.router.softmax_after_top_k = true;
    moe.router.linear_bias = true;
    kind.moe = moe;
    const int layers = layer_count(json);
    std::vector<bool> alternating;
    for (int layer = 0; layer < layers; ++layer) alternating.push_back(layer % 2 == 0);
    for (const bool sliding : layers_of_type(json, "sliding_attention", layers, alternating)) {
        kind.attention.window = sliding ? json.integer_or("sliding_window", 128, 1, max_window) : 0;
        add_layer(model, kind);
    }
}

namespace {

// The first published files say 4 where later ones say true.
bool tunes_temperature(const JsonObject& json) {
    try {
        return says(json, "attn_temperature_tuning", true);
    } catch (const Error&) {
        return json.integer("attn_temperature_tuning", 0, 1 << 20) != 0;
    }
}

} // namespace

// One routed expert per token weighted by a sigmoid on the expert's input, beside a shared expert of the same width.
// Layers with rotary positions see their chunk of the sequence alone; every fourth has none and sees all of it.
void read_llama4(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 500000.0);
    model.rope_interleaved = true;
    model::Moe moe;
    moe.experts = integer(json, "num_local_experts", max_experts);
    moe.top_k = integer(json, "num_experts_per_tok", max_experts);
    moe.ffn = moe.shared_ffn = ffn(json, "intermediate_size");
    moe.probs_on_input = true;
    moe.router.scoring = model::Scoring::sigmoid;
    const int layers = layer_count(json);
    const int step = integer_or(json, "interleave_moe_layer_step", 1, 1, max_layers);
    std::vector<bool> sparse;
    for (int layer = 0; layer < layers; ++layer) sparse.push_back((layer + 1) % step == 0);
    if (json.is_array("moe_layers")) {
        std::fill(sparse.begin(), sparse.end(), false);
        for (const std::int64_t layer : json.integers("moe_layers", 0, layers - 1))
            sparse[static_cast<std::size_t>(layer)] = true;
    }
    std::vector<bool> rotates;
    const int whole = integer_or(json, "no_rope_layer_interval", 4, 1, max_layers);
    for (int layer = 0; layer < layers; ++layer) rotates.push_back((layer + 1) % whole != 0);
    const auto listed = json.is_array("no_rope_layers") ? json.integers("no_rope_layers", 0, 1)
                                                        : std::vector<std::int64_t>{}; // 1: has rotary positions
    if (!listed.empty()) check_length(json, "no_rope_layers", listed.size(), layers);
    if (!listed.empty()) rotates.assign(listed.begin(), listed.end());
    const std::vector<bool> chunked = layers_of_type(json, "chunked_attention", layers, rotates);
    const bool norms = says(json, "use_qk_norm", true);
    if (norms) model.rope_scaling.attention_factor = 1.0; // The norm behind the rotation takes it out again.
    const std::int64_t chunk = json.integer_or("attention_chunk_size", 8192, 1, max_window);
    for (std::size_t layer = 0; layer < sparse.size(); ++layer) {
        model::LayerKind kind;
        kind.attention = read_gqa(json, model);
        kind.attention.qkv_bias = kind.attention.out_bias = json.boolean_or("attention_bias", false);
        if (chunked[layer]) kind.attention.chunk = chunk;
        if (rotates[layer]) {
            kind.attention.qk_norm = kind.attention.plain_qk_norm = norms;
        } else {
            kind.attention.rope_dim = 0;
            if (tunes_temperature(json))
                kind.attention.query_scale = {json.number_or("attn_scale", 0.1, 0.0, 1e6),
                                              json.number_or("floor_scale", 8192.0, 1.0, 1e12), 1.0};
        }
        kind.activation = read_activation(json, "silu");
        if (sparse[layer])
            kind.moe = moe;
        else
            kind.dense_ffn = ffn(json, "intermediate_size_mlp");
        add_layer(model, kind);
    }
}

// Plain two-matrix MLPs of squared ReLU with LayerNorm and without biases (Nemotron-4).
void read_nemotron(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 10000.0);
    model.layer_norm = model.layer_norm_bias = true;
    model.norms_from_one = true; // NemotronLayerNorm1P
    model::LayerKind kind;
    kind.attention = read_gqa(json, model, 0.5);
    kind.attention.qkv_bias = kind.attention.out_bias = json.boolean_or("attention_bias", false);
    kind.dense_ffn = ffn(json, "intermediate_size");
    kind.activation = read_activation(json, "relu2");
    kind.gated = json.boolean_or("mlp_gated", false);
    kind.mlp_bias = json.boolean_or("mlp_bias", false);
    const int layers = layer_count(json);
    for (int layer = 0; layer < layers; ++layer) add_layer(model, kind);
}

} // namespace moe::families
