// Mixtral and those that, like it, send every token through routed experts alone: Grok-1, OLMoE, Phi-3.5-MoE, DBRX,
// Granite, MiniMax-M2. Parts of them that the engine does not train are named in not_executable.
#include "planner/base/error.hpp"
#include "planner/model/families/families.hpp"
#include "planner/model/families/parts.hpp"

namespace moe::families {
namespace {

// Experts as wide as intermediate_size, whose number stands under either of two names.
model::Moe read_routed_experts(const JsonObject& json) {
    model::Moe moe;
    moe.experts = integer(json, spelled(json, "num_local_experts", "num_experts"), max_experts);
    moe.top_k = integer(json, "num_experts_per_tok", max_experts);
    moe.ffn = ffn(json, "intermediate_size");
    return moe;
}

void add_alike(model::Model& model, const model::LayerKind& kind, int layers) {
    for (int layer = 0; layer < layers; ++layer) add_layer(model, kind);
}

void read_window(const JsonObject& json, model::Attention& attention) {
    if (json.has("sliding_window")) attention.window = json.integer("sliding_window", 1, max_window);
}

// The decoder of all of them but DBRX.
model::LayerKind read_layer(const JsonObject& json, const model::Model& model, const std::string& activation,
                            std::optional<double> rotary = {}) {
    model::LayerKind kind;
    kind.attention = read_gqa(json, model, rotary);
    kind.activation = read_activation(json, activation);
    kind.moe = read_routed_experts(json);
    return kind;
}

} // namespace

// Mixtral divides the chosen softmax weights by their sum, which equals a softmax over the chosen logits alone.
void read_mixtral(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 1e6);
    model::LayerKind kind = read_layer(json, model, "silu");
    read_window(json, kind.attention);
    kind.moe->router.softmax_after_top_k = true;
    add_alike(model, kind, layer_count(json));
}

// Grok-1 keeps the chosen weights of the softmax over all experts as they are.
void read_grok(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 10000.0);
    model.tied_embeddings = says(json, "tie_word_embeddings", true);
    model::LayerKind kind = read_layer(json, model, "gelu");
    read_window(json, kind.attention);
    add_alike(model, kind, layer_count(json));
    model.not_executable =
        "Grok-1: norms on both sides, factors of its own and a bound of the scores (tanh) are not trained yet";
}

void read_olmoe(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 10000.0);
    model::LayerKind kind = read_layer(json, model, "silu");
    kind.attention.qk_norm = kind.attention.whole_qk_norm = true;
    kind.attention.qkv_bias = kind.attention.out_bias = json.boolean_or("attention_bias", false);
    if (json.has("clip_qkv")) kind.attention.clip = json.number("clip_qkv", 1e-9, 1e6);
    kind.moe->router.normalize = json.boolean_or("norm_topk_prob", false);
    add_alike(model, kind, layer_count(json));
}

// Its experts are picked one after another by logits that are near; training samples among those near, which is not
// done here: the best is taken as in inference (transformers 5.24, modeling_phimoe.py, sparsemixer()).
void read_phimoe(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 1e6);
    model.layer_norm = model.layer_norm_bias = true;
    model::LayerKind kind = read_layer(json, model, "silu");
    kind.attention.qkv_bias = kind.attention.out_bias = json.boolean_or("attention_bias", false);
    read_window(json, kind.attention);
    if (kind.moe->top_k != 2) // The class picks two whatever the file says.
        model.not_executable =
            fmt::format("num_experts_per_tok = {}: only 2 is trained of Phi-3.5-MoE", kind.moe->top_k);
    kind.moe->router.mixer = json.number_or("router_jitter_noise", 0.01, 1e-9, 1e6);
    model.head_bias = json.boolean_or("lm_head_bias", false);
    add_alike(model, kind, layer_count(json));
    if (json.number_or("input_jitter_noise", 0.0, 0.0, 1.0) > 0.0)
        model.not_executable = "input_jitter_noise: must be 0, it is noise on what experts read as well; the plan's "
                               "input_jitter is on what routers read";
}

// Granite scales embeddings, scores, residuals and logits by constants of its own.
void read_granite_moe(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    model::LayerKind kind = read_layer(json, model, "silu");
    kind.attention.qkv_bias = kind.attention.out_bias = json.boolean_or("attention_bias", false);
    kind.moe->shared_ffn = json.integer_or("shared_intermediate_size", 0, 0, max_ffn);
    kind.moe->router.softmax_after_top_k = true;
    kind.attention.scale = read_granite_factors(json, model);
    add_alike(model, kind, layer_count(json));
}

// The published weights hold none of the MTP modules that its config mentions, nor does the configuration class.
void read_minimax_m2(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 5e6);
    must_be(json, "qk_norm_type", "per_layer");
    must_be(json, "scoring_func", "sigmoid");
    pass_over(json,
              {"layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta",
               "mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "shared_moe_mode", "use_mtp"});
    model::LayerKind kind = read_layer(json, model, "silu", 1.0);
    kind.attention.rope_dim = integer_or(json, "rotary_dim", kind.attention.rope_dim, 0, max_dim);
    kind.attention.qk_norm = kind.attention.whole_qk_norm = says(json, "use_qk_norm", true);
    model::Router& router = kind.moe->router;
    router.scoring = model::Scoring::sigmoid;
    router.expert_bias = says(json, "use_routing_bias", true);
    router.normalize = true;
    add_alike(model, kind, layer_count(json));
}

// DBRX names everything in its own way, in three objects.
void read_dbrx(const JsonObject& json, model::Model& model) {
    model.hidden = json.integer("d_model", 1, max_hidden);
    model.vocab = json.integer("vocab_size", 2, max_vocab);
    model.tied_embeddings = json.boolean_or("tie_word_embeddings", false);
    model.norm_eps = 1e-5;
    const JsonObject attn = json.object("attn_config"), experts = json.object("ffn_config");
    // The published file has the base beside the clip; transformers writes what it turns by into rope_parameters.
    model::Rope rope{attn.number_or("rope_theta", 10000.0, 1.0, 1e12), {}};
    for (const char* key : {"rope_scaling", "rope_parameters"})
        if (json.is_object(key)) rope = read_rope(json.object(key), json, rope.theta);
    model.rope_theta = rope.theta;
    model.rope_scaling = rope.scaling;
    model::LayerKind kind;
    model::Attention& attention = kind.attention;
    attention.heads = integer(json, "n_heads", max_heads);
    attention.kv_heads = integer_or(attn, "kv_n_heads", 1, 1, max_heads);
    if (model.hidden % attention.heads != 0)
        json.refuse_value("n_heads", fmt::format("must divide d_model = {}", model.hidden));
    attention.qk_dim = attention.v_dim = attention.rope_dim = static_cast<int>(model.hidden / attention.heads);
    if (attn.has("clip_qkv")) attention.clip = attn.number("clip_qkv", 1e-9, 1e6);
    model::Moe moe;
    moe.experts = integer_or(experts, "moe_num_experts", 4, 1, max_experts);
    moe.top_k = integer_or(experts, "moe_top_k", 1, 1, max_experts);
    moe.ffn = ffn(experts, "ffn_hidden_size");
    const char* norm = "moe_normalize_expert_weights"; // the power of the norm that divides the chosen weights
    moe.router.normalize = !experts.states(norm) || experts.has(norm);
    if (experts.number_or(norm, 1.0, 0.0, 1e6) != 1.0) experts.refuse_value(norm, "only 1 or null is known");
    if (experts.is_object("ffn_act_fn")) must_be(experts.object("ffn_act_fn"), "name", "silu");
    kind.moe = moe;
    add_alike(model, kind, integer(json, "n_layers", max_layers));
    model.layer_norm = true;
    if (experts.number_or("moe_jitter_eps", 0.0, 0.0, 1.0) > 0.0)
        model.not_executable = "moe_jitter_eps: must be 0, it is noise on what experts read as well; the plan's "
                               "input_jitter is on what routers read";
}

} // namespace moe::families
