// Dense models that differ from Llama in a few parts: biases, windows, layers that turn nothing, norms on both sides or
// behind, factors of embeddings and sums, plain MLPs.
#include "planner/model/families/families.hpp"
#include "planner/model/families/opaque_parts.hpp"
#include "planner/model/families/parts.hpp"

#include <algorithm>
#include <cmath>

namespace moe::families {
namespace {

constexpr const char* norms_behind = "norms behind attention and MLP, none before them: not trained yet";

// A decoder of one MLP; its attention is the caller's.
model::LayerKind read_layer(const JsonObject& json, const model::Model& model, const char* activation = "silu",
                            bool gated = true) {
    refuse_experts(json, model);
    model::LayerKind kind;
    kind.activation = read_activation(json, activation);
    kind.gated = gated;
    kind.dense_ffn = ffn(json, "intermediate_size");
    kind.mlp_bias = json.boolean_or("mlp_bias", false);
    return kind;
}

model::Attention read_attention(const JsonObject& json, const model::Model& model, bool biased = false) {
    model::Attention attention = read_gqa(json, model);
    attention.qkv_bias = attention.out_bias = json.boolean_or("attention_bias", biased);
    return attention;
}

void add_alike(const JsonObject& json, model::Model& model, const model::LayerKind& kind) {
    const int layers = layer_count(json);
    for (int layer = 0; layer < layers; ++layer) add_layer(model, kind);
}

// Layers of windows as layer_types says, else as `fallback` does; those that see everything are the caller's.
void add_windows(const JsonObject& json, model::Model& model, const model::LayerKind& kind,
                 const model::Attention& full, const model::Attention& window, const std::vector<bool>& fallback) {
    model::LayerKind here = kind;
    for (const bool sliding : layers_of_type(json, "sliding_attention", static_cast<int>(fallback.size()), fallback)) {
        here.attention = sliding ? window : full;
        add_layer(model, here);
    }
}

std::vector<bool> all_but_every(int step, int layers) {
    std::vector<bool> list;
    for (int layer = 0; layer < layers; ++layer) list.push_back((layer + 1) % step != 0);
    return list;
}

} // namespace

void read_seed_oss(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    model::LayerKind kind = read_layer(json, model);
    kind.attention = read_attention(json, model, true);
    kind.attention.out_bias = json.boolean_or("attention_out_bias", false);
    add_alike(json, model, kind);
}

// Ministral 3: a window in every layer, or none; queries grow with their position.
void read_ministral3(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 10000.0);
    need_rotation(json);
    model::LayerKind kind = read_layer(json, model);
    kind.attention = read_gqa(json, model);
    kind.attention.query_scale = read_query_scale(json, model);
    if (json.has("sliding_window")) kind.attention.window = json.integer("sliding_window", 1, max_window);
    add_alike(json, model, kind);
}

// Ministral of 2024 and CWM: windows in the layers that layer_types names, where it is silent in all, or in three of
// four.
void read_windowed(const JsonObject& json, model::Model& model) {
    const bool cwm = model.architecture == "CwmForCausalLM";
    read_common(json, model, cwm ? 1e-5 : 1e-6, cwm ? 1e6 : 10000.0);
    if (cwm) need_rotation(json);
    model::LayerKind kind = read_layer(json, model);
    const model::Attention full = read_gqa(json, model);
    model::Attention window = full;
    window.window = json.has("sliding_window") ? json.integer("sliding_window", 1, max_window) : 0;
    const int layers = layer_count(json);
    std::vector<bool> fallback(static_cast<std::size_t>(layers), !cwm);
    for (int layer = 0; cwm && layer < layers; ++layer) fallback[static_cast<std::size_t>(layer)] = layer % 4 != 0;
    add_windows(json, model, kind, full, window, fallback);
}

// SmolLM3: every fourth layer turns nothing.
void read_smollm3(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 2e6);
    model.tied_embeddings = says(json, "tie_word_embeddings", true);
    const int layers = layer_count(json);
    model::LayerKind kind = read_layer(json, model);
    const model::Attention attention = read_attention(json, model);
    const std::vector<bool> turns =
        json.has("no_rope_layers")
            ? flags(json, "no_rope_layers", layers)
            : all_but_every(integer_or(json, "no_rope_layer_interval", 4, 1, max_layers), layers);
    const std::vector<bool> none(turns.size());
    const std::vector<bool> sliding = layers_of_type(json, "sliding_attention", layers, none);
    for (std::size_t layer = 0; layer < turns.size(); ++layer) {
        kind.attention = attention;
        if (!turns[layer]) kind.attention.rope_dim = 0;
        if (sliding[layer]) kind.attention.window = json.integer("sliding_window", 1, max_window);
        add_layer(model, kind);
    }
    pass_over(json, {"sliding_window", "use_sliding_window", "no_rope_layer_interval"});
}

// Granite without experts: the factors of GraniteMoe.
void read_granite(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    model::LayerKind kind = read_layer(json, model);
    kind.attention = read_attention(json, model);
    kind.attention.scale = read_granite_factors(json, model);
    add_alike(json, model, kind);
}

// Arcee's AFM-4.5B: a plain MLP of squared ReLU. Apertus has one of xIELU, with two numbers in each layer.
void read_arcee(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 10000.0);
    model::LayerKind kind = read_layer(json, model, "relu2", false);
    kind.attention = read_attention(json, model);
    add_alike(json, model, kind);
}

void read_apertus(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 12e6);
    must_be(json, "hidden_act", "xielu");
    model::LayerKind kind = read_layer(json.with_string("hidden_act", "relu2"), model, "relu2", false);
    kind.attention = read_attention(json, model);
    kind.attention.qk_norm = true;
    if (!says(json, "qk_norm", true)) json.refuse_value("qk_norm", "only true is known of Apertus");
    if (json.boolean_or("post_norm", false)) json.refuse_value("post_norm", "only false is known of Apertus");
    kind.attention.opaque = opaque_part("numbers of xIELU", {0, 2});
    add_alike(json, model, kind);
}

// Phi-3 and Phi-4, whose projections are joined.
void read_phi3(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 10000.0);
    model::LayerKind kind = read_layer(json, model);
    kind.attention = read_gqa(json, model, 1.0);
    if (json.has("sliding_window")) kind.attention.window = json.integer("sliding_window", 1, max_window);
    add_alike(json, model, kind);
    model.not_executable = "qkv_proj, gate_up_proj: joined projections of Phi-3 are not trained yet";
}

// GLM-4 of 9B and 32B; the second generation has norms on both sides.
void read_glm(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1.5625e-7, 10000.0);
    model.post_norms = model.architecture == "Glm4ForCausalLM";
    model.rope_interleaved = true;
    model::LayerKind kind = read_layer(json, model);
    kind.attention = read_gqa(json, model, 0.5);
    kind.attention.qkv_bias = json.boolean_or("attention_bias", true);
    add_alike(json, model, kind);
    model.not_executable = "gate_up_proj: joined projections of GLM-4 are not trained yet";
}

// OLMo 2 and 3: norms of whole queries and keys. FlexOlmo sends every token through experts of such a model.
void read_olmo(const JsonObject& json, model::Model& model) {
    const bool flexible = model.architecture == "FlexOlmoForCausalLM";
    read_common(json, model, flexible ? 1e-6 : 1e-5, 10000.0);
    model::LayerKind kind;
    if (flexible) {
        kind.activation = read_activation(json, "silu");
        model::Moe& moe = kind.moe.emplace();
        moe.experts = integer(json, "num_experts", max_experts);
        moe.top_k = integer(json, "num_experts_per_tok", max_experts);
        moe.ffn = ffn(json, "intermediate_size");
        moe.router.normalize = json.boolean_or("norm_topk_prob", false);
    } else {
        kind = read_layer(json, model);
    }
    model::Attention full = read_attention(json, model);
    full.qk_norm = full.whole_qk_norm = true;
    model::Attention window = full;
    const int layers = layer_count(json);
    const bool third = model.architecture == "Olmo3ForCausalLM";
    if (third) {
        window.window = json.integer_or("sliding_window", 4096, 1, max_window);
        full.rope = rope_of_type(json, "full_attention", 10000.0);
        window.rope = rope_of_type(json, "sliding_attention", 10000.0);
    }
    const std::vector<bool> none(static_cast<std::size_t>(layers));
    add_windows(json, model, kind, full, window, third ? all_but_every(4, layers) : none);
    model.not_executable = norms_behind;
}

// EXAONE 4: where there are windows, layers that see everything turn nothing.
void read_exaone4(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 10000.0);
    model::LayerKind kind = read_layer(json, model);
    model::Attention full = read_gqa(json, model);
    full.qk_norm = true;
    model::Attention window = full;
    const bool slides = !json.states("sliding_window") || json.has("sliding_window");
    if (slides) {
        window.window = json.integer_or("sliding_window", 4096, 1, max_window);
        full.rope_dim = 0;
    }
    const int layers = layer_count(json);
    pass_over(json, {"sliding_window_pattern"}); // layer_types stands beside it
    const std::vector<bool> none(static_cast<std::size_t>(layers));
    add_windows(json, model, kind, full, window, slides ? all_but_every(4, layers) : none);
    model.not_executable = norms_behind;
}

// Gemma 3: five layers of windows to one that sees everything, each with a rotation of its own; norms on both sides.
// Gemma 2: one to one, one rotation, and bounds of the scores in place of norms of queries and keys.
void read_gemma3(const JsonObject& json, model::Model& model) {
    const bool second = model.architecture == "Gemma2ForCausalLM";
    read_common(json, model, 1e-6, second ? 1e4 : 1e6);
    model.tied_embeddings = says(json, "tie_word_embeddings", true);
    model.post_norms = model.norms_from_one = true;
    model.embedding_scale = std::sqrt(static_cast<double>(model.hidden));
    const double cap = second && !json.states("final_logit_softcapping") ? 30.0 : 0.0;
    model.logit_cap = json.number_or("final_logit_softcapping", cap, 1e-6, 1e6);
    model::LayerKind kind = read_layer(json, model, "gelu_pytorch_tanh");
    model::Attention full = read_attention(json, model);
    full.qk_norm = !second;
    full.scale = 1.0 / std::sqrt(json.number_or("query_pre_attn_scalar", 256.0, 1e-9, 1e9));
    model::Attention window = full;
    window.window = json.integer_or("sliding_window", 4096, 1, max_window);
    if (!second) full.rope = rope_of_type(json, "full_attention", 1e6);
    if (!second)
        window.rope = rope_of_type(json, "sliding_attention", 10000.0)
                          .value_or(model::Rope{json.number_or("rope_local_base_freq", 10000.0, 1.0, 1e12), {}});
    const int step = integer_or(json, "sliding_window_pattern", second ? 2 : 6, 1, max_layers);
    add_windows(json, model, kind, full, window, all_but_every(step, layer_count(json)));
    if (json.boolean_or("use_bidirectional_attention", false))
        json.refuse_value("use_bidirectional_attention", "only causal attention is known");
    if (json.has("attn_logit_softcapping") || (second && !json.states("attn_logit_softcapping")))
        model.not_executable = "attn_logit_softcapping: a bound of the scores is not trained yet";
}

} // namespace moe::families
