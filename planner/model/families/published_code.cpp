// Families with experts whose classes are published beside their weights, or whose words are their own: parts that
// others have as well under other names. Their training is not held to those classes, so that execute refuses them.
#include "planner/base/error.hpp"
#include "planner/model/families/families.hpp"
#include "planner/model/families/opaque_parts.hpp"
#include "planner/model/families/parts.hpp"

#include <algorithm>

namespace moe::families {
namespace {

constexpr const char* own_names = "weights under names of their own are not read yet";

void not_trained(model::Model& model, const std::string& why) {
    model.not_executable = model.architecture + ": " + why;
}

// Layers of one attention whose experts stand in those that are marked.
void add_marked(model::Model& model, const std::vector<bool>& sparse, const model::LayerKind& base,
                const model::Moe& moe, std::int64_t dense_ffn) {
    for (const bool experts : sparse) {
        model::LayerKind kind = base;
        if (experts)
            kind.moe = moe;
        else
            kind.dense_ffn = dense_ffn;
        add_layer(model, kind);
    }
}

model::LayerKind read_base(const JsonObject& json, const model::Model& model, const std::string& activation) {
    model::LayerKind kind;
    kind.attention = read_gqa(json, model);
    kind.attention.qkv_bias = kind.attention.out_bias = json.boolean_or("attention_bias", false);
    kind.activation = read_activation(json, activation);
    return kind;
}

std::vector<bool> all_layers(const JsonObject& json) {
    return std::vector<bool>(static_cast<std::size_t>(layer_count(json)), true);
}

} // namespace

// Grok-2: an MLP beside the experts (residual_moe), as wide as intermediate_size; norms on both sides; scores, logits
// and those of the router are bounded.
void read_grok2(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 10000.0);
    model.post_norms = true;
    model.embedding_scale = json.number_or("embedding_multiplier_scale", 1.0, 1e-9, 1e6);
    model.logit_scale = json.number_or("output_multiplier_scale", 1.0, 1e-9, 1e6);
    if (json.has("final_logit_softcapping")) model.logit_cap = json.number("final_logit_softcapping", 1e-6, 1e6);
    model::LayerKind base = read_base(json, model, "gelu");
    const std::int64_t window = json.integer_or("sliding_window_size", -1, -1, max_window);
    if (window > 0 && integer_or(json, "global_attn_every_n", 1, 1, max_layers) > 1)
        json.refuse_value("global_attn_every_n", "only 1 is known: layers that see everything");
    pass_over(json, {"attn_logit_softcapping", "router_logit_softcapping", "attn_temperature_len",
                     "sliding_window_size", "global_attn_every_n"});
    model::Moe moe;
    moe.experts = integer(json, "num_local_experts", max_experts);
    moe.top_k = integer(json, "num_experts_per_tok", max_experts);
    moe.ffn = ffn(json, "moe_intermediate_size");
    if (json.boolean_or("residual_moe", false)) moe.shared_ffn = ffn(json, "intermediate_size");
    add_marked(model, all_layers(json), base, moe, 0);
    not_trained(model, "bounds of scores (attn_logit_softcapping) and factors of its own are not trained yet");
}

// Skywork-MoE: Mixtral with the number of experts in a list of one.
void read_skywork(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    model::LayerKind base = read_base(json, model, "silu");
    model::Moe moe;
    if (json.is_array("num_experts")) {
        const std::vector<std::int64_t> experts = json.integers("num_experts", 1, max_experts);
        if (experts.size() != 1) json.refuse_value("num_experts", "must be a list of one number");
        moe.experts = static_cast<int>(experts[0]);
    } else {
        moe.experts = integer(json, "num_experts", max_experts);
    }
    moe.top_k = integer_or(json, "num_experts_per_tok", 2, 1, max_experts);
    moe.ffn = ffn(json, "intermediate_size");
    moe.router.normalize = true;
    const int step = integer_or(json, "moe_expert_interval", 1, 1, max_layers);
    pass_over(json, {"moe_use_skywork_gating"}); // the gate's logits alone
    add_marked(model, every(step, layer_count(json)), base, moe, moe.ffn);
    not_trained(model, own_names);
}

// XVERSE-MoE: shared experts of the routed ones' width.
void read_xverse(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    model::LayerKind base = read_base(json, model, "silu");
    if (json.integer_or("num_experts", 0, 0, max_experts) == 0)
        json.refuse_value("num_experts", "dense models of XVERSE are not supported");
    model::Moe moe;
    moe.experts = integer(json, "num_experts", max_experts);
    moe.top_k = integer(json, "moe_top_k", max_experts);
    moe.ffn = ffn(json, "intermediate_size");
    moe.shared_ffn = moe.ffn * json.integer_or("num_shared_experts", 0, 0, 1024);
    moe.router.normalize = true;
    add_marked(model, all_layers(json), base, moe, 0);
    not_trained(model, own_names);
}

// Pangu Pro MoE: as many groups of experts as a token chooses, the best of each.
void read_pangu_pro(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 10000.0);
    model::LayerKind base = read_base(json, model, "silu");
    base.attention.qkv_bias = base.attention.out_bias =
        json.boolean_or("attention_bias", json.boolean_or("qkv_bias", false));
    model::Moe moe;
    moe.experts = integer(json, "num_experts", max_experts);
    moe.top_k = integer(json, "num_experts_per_tok", max_experts);
    moe.ffn = ffn(json, "moe_intermediate_size");
    moe.shared_ffn = json.integer_or("shared_expert_intermediate_size", 0, 0, max_ffn);
    moe.router.scale = json.number_or("routed_scaling_factor", 1.0, 0.0, 1e6);
    pass_over(json, {"num_expert_groups", "router_enable_expert_bias"});
    add_marked(model, all_layers(json), base, moe, 0);
    not_trained(model, "the best expert of each group is a choice that is not trained yet");
}

// openPangu Ultra MoE: DeepSeek-V3's parts, with norms on both sides (sandwich_norm).
void read_pangu_ultra(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 10000.0);
    model.rope_interleaved = true;
    model.post_norms = json.boolean_or("sandwich_norm", false);
    model::LayerKind base;
    base.activation = read_activation(json, "silu");
    model::Attention& attention = base.attention;
    attention.kind = model::AttentionKind::mla;
    attention.heads = attention.kv_heads = integer(json, "num_attention_heads", max_heads);
    attention.rope_dim = integer(json, "attention_qk_rope_dim", max_dim / 2);
    attention.qk_dim = integer(json, "attention_qk_dim", max_dim / 2) + attention.rope_dim;
    attention.v_dim = integer(json, "attention_v_dim", max_dim);
    attention.q_lora = integer_or(json, "attention_q_lora_dim", 0, 0, max_hidden);
    attention.kv_lora = integer(json, "attention_kv_lora_dim", max_hidden);
    attention.qkv_bias = attention.out_bias = json.boolean_or("attention_bias", false);
    model::Moe moe = read_experts(json, "num_routed_experts", "num_shared_experts", 1);
    moe.router = selecting_router(json, "norm_topk_prob", "routed_scaling_factor", 1.0);
    const int first = integer_or(json, "num_dense_layers", 0, 0, max_layers);
    add_marked(model, after(first, layer_count(json)), base, moe, ffn(json, "intermediate_size"));
    repeat_last_as_mtp(json, model, "num_mtp_layers");
    not_trained(model, own_names);
}

// Snowflake Arctic: a dense MLP as wide as the model beside the experts (use_residual).
void read_arctic(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 10000.0);
    model::LayerKind base = read_base(json, model, "silu");
    if (json.has("sliding_window")) base.attention.window = json.integer("sliding_window", 1, max_window);
    model::Moe moe;
    moe.experts = integer(json, "num_local_experts", max_experts);
    moe.top_k = integer_or(json, "num_experts_per_tok", 1, 1, max_experts);
    moe.ffn = ffn(json, "intermediate_size");
    if (json.boolean_or("use_residual", false)) moe.shared_ffn = model.hidden;
    moe.router.normalize = true;
    const int step = integer_or(json, "moe_layer_frequency", 2, 1, max_layers);
    pass_over(json, {"parallel_attn_mlp_res", "enable_expert_tensor_parallelism", "moe_min_capacity",
                     "moe_token_dropping", "quantization"});
    add_marked(model, every(step, layer_count(json)), base, moe, moe.ffn);
    not_trained(model, "the dense MLP that reads what attention reads is not trained yet");
}

// Aria's language model, whose experts are as wide as moe_intermediate_size, or intermediate_size in transformers.
void read_aria(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    model::LayerKind base = read_base(json, model, "silu");
    model::Moe moe;
    moe.experts = integer(json, "moe_num_experts", max_experts);
    moe.top_k = integer(json, "moe_topk", max_experts);
    moe.ffn = ffn(json, json.has("moe_intermediate_size") ? "moe_intermediate_size" : "intermediate_size");
    moe.shared_ffn = moe.ffn * json.integer_or("moe_num_shared_experts", 2, 0, 1024);
    moe.router.softmax_after_top_k = true;
    base.mlp_bias = false;
    if (json.boolean_or("mlp_bias", false)) json.refuse_value("mlp_bias", "only false is known of Aria");
    add_marked(model, all_layers(json), base, moe, 0);
    not_trained(model, own_names);
}

// LongCat-Flash: a layer is two of attention and a dense MLP, and experts beside the first MLP whose sum comes behind
// the second. Of the experts that a token chooses, those without weights (zero_expert_num) compute nothing; as many
// count here as are left where all are chosen alike (12 of 512 + 256: 8, as the report's average of 27 B active).
void read_longcat(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 10000000.0);
    model.rope_interleaved = true;
    model::LayerKind dense;
    dense.attention = read_mla(json);
    dense.attention.qkv_bias = dense.attention.out_bias = json.boolean_or("attention_bias", false);
    dense.activation = read_activation(json, "silu");
    dense.dense_ffn = ffn(json, "ffn_hidden_size");
    model::LayerKind sparse = dense;
    sparse.dense_ffn = 0;
    model::Moe& moe = sparse.moe.emplace();
    moe.experts = integer(json, "n_routed_experts", max_experts);
    const int weightless = integer_or(json, "zero_expert_num", 0, 0, max_experts);
    must_be(json, "zero_expert_type", "identity");
    must_be(json, "attention_method", "MLA");
    const int chosen = integer(json, "moe_topk", max_experts);
    moe.top_k = std::max(
        1, static_cast<int>((static_cast<std::int64_t>(chosen) * moe.experts + (moe.experts + weightless) / 2) /
                            (moe.experts + weightless)));
    moe.ffn = ffn(json, "expert_ffn_hidden_size");
    moe.shared_ffn = dense.dense_ffn;
    moe.router.scale = json.number_or("routed_scaling_factor", 1.0, 0.0, 1e6);
    moe.router.linear_bias = json.boolean_or("router_bias", false);
    moe.router.expert_bias = true;
    pass_over(json, {"mla_scale_q_lora", "mla_scale_kv_lora"});
    const int layers = integer(json, json.has("num_layers") ? "num_layers" : "num_hidden_layers", max_layers / 2);
    for (int layer = 0; layer < layers; ++layer) {
        add_layer(model, sparse);
        add_layer(model, dense);
    }
    for (int depth = integer_or(json, "num_nextn_predict_layers", 0, 0, 64); depth > 0; --depth) add_mtp(model, dense);
    not_trained(model, "experts beside two layers, some without weights, are not trained yet");
}

// Klear: Qwen3-MoE with sigmoid scores, a bias that selects and shared experts; a row of two weights per token mixes
// their sum with that of the routed ones.
void read_klear(const JsonObject& json, model::Model& model) {
    read_qwen3_moe(json, model);
    const std::int64_t shared = json.integer_or("n_shared_experts", 1, 0, 1024);
    for (model::LayerKind& kind : model.kinds) {
        if (!kind.moe) continue;
        kind.moe->shared_ffn = shared * kind.moe->ffn;
        kind.moe->router.scoring = model::Scoring::sigmoid;
        kind.moe->router.expert_bias = true;
        kind.attention.opaque = opaque_part("weights of both sums", {0, 2 * model.hidden + 2});
    }
    pass_over(json, {"routed_scaling_factor", "moe_aux_loss_coeff"}); // which no published code reads
}

// Kolibri 1: norms on both sides, windows in four layers of five, of which the fifth turns nothing.
void read_kolibri(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    model.post_norms = true;
    const int layers = layer_count(json);
    model::LayerKind base = read_base(json, model, "silu");
    base.attention.qk_norm = true;
    model::Moe moe = read_experts(json, spelled(json, "num_experts", "num_local_experts"), "", 0);
    moe.shared_ffn = json.integer("shared_expert_intermediate_size", 0, max_ffn);
    moe.router.scoring = model::Scoring::sigmoid;
    moe.router.expert_bias = true;
    moe.router.normalize = json.boolean_or("norm_topk_prob", false);
    std::vector<bool> windows = every(5, layers);
    windows.flip();
    for (const bool sliding : layers_of_type(json, "sliding_attention", layers, windows)) {
        model::LayerKind kind = base;
        kind.moe = moe;
        if (sliding)
            kind.attention.window = json.integer_or("sliding_window", 513, 1, max_window);
        else
            kind.attention.rope_dim = 0;
        add_layer(model, kind);
    }
    not_trained(model, "a bias on the router's logits, which selects before the sigmoid, is not trained yet");
}

// SmallThinker: every layer's experts are routed by what its attention reads; gates are a plain ReLU.
void read_smallthinker(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    const int layers = layer_count(json);
    model::LayerKind base;
    base.attention = read_gqa(json, model);
    base.activation = model::Activation::relu2;
    model::Moe moe;
    moe.experts = integer(json, "moe_num_primary_experts", max_experts);
    moe.top_k = integer(json, "moe_num_active_primary_experts", max_experts);
    moe.ffn = ffn(json, "moe_ffn_hidden_size");
    moe.router.scoring =
        json.boolean_or("moe_primary_router_apply_softmax", false) ? model::Scoring::softmax : model::Scoring::sigmoid;
    moe.router.normalize = says(json, "norm_topk_prob", true);
    const std::vector<bool> none(static_cast<std::size_t>(layers)), all = all_layers(json);
    const std::vector<bool> turns = json.has("rope_layout") ? flags(json, "rope_layout", layers) : all;
    const std::vector<bool> sliding =
        json.has("sliding_window_layout") ? flags(json, "sliding_window_layout", layers) : none;
    const std::vector<bool> sparse = json.has("moe_layer_layout") ? flags(json, "moe_layer_layout", layers) : all;
    for (std::size_t layer = 0; layer < all.size(); ++layer) {
        model::LayerKind kind = base;
        if (!turns[layer]) kind.attention.rope_dim = 0;
        if (sliding[layer]) kind.attention.window = json.integer("sliding_window_size", 1, max_window);
        if (sparse[layer])
            kind.moe = moe;
        else
            kind.dense_ffn = ffn(json, "dense_ffn_hidden_size");
        add_layer(model, kind);
    }
    pass_over(json, {"sliding_window_size"});
    not_trained(model, "a plain ReLU and routers before attention are not trained yet");
}

} // namespace moe::families
