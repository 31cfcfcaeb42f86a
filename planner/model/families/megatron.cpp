// Megatron's GPT: whatever attention, router and MLP the arguments of Megatron-Core's one block compose.
#include "planner/model/families/families.hpp"
#include "planner/model/families/parts.hpp"

#include <algorithm>

namespace moe::families {
namespace {

// Whether a field that may be missing has the first of its two words.
bool is_first(const JsonObject& json, const std::string& key, const std::string& first, const std::string& second) {
    const std::string word = json.string_or(key, first);
    if (word != first && word != second) json.refuse_value(key, "must be " + first + " or " + second);
    return word == first;
}

model::Attention read_softmax(const JsonObject& json, const model::Model& model, bool biases, double rotary) {
    const bool latent = json.has("kv_lora_rank");
    model::Attention attention = latent ? read_mla(json) : read_gqa(json, model, rotary);
    attention.out_bias = biases;
    attention.qkv_bias = biases || json.boolean_or("qkv_bias", false);
    attention.qk_norm = !latent && json.boolean_or("use_qk_norm", false);
    attention.output_gate = json.boolean_or("attn_output_gate", false);
    attention.sinks = json.boolean_or("attention_sinks", false);
    return attention;
}

// A group's score is the sum of as many experts as are chosen of each group
// (megatron/core/transformer/moe/moe_utils.py, group_limited_topk).
model::Moe read_block_experts(const JsonObject& json, bool biases) {
    model::Moe moe = read_experts(json, "n_routed_experts", "", 0);
    moe.shared_ffn = json.integer_or("shared_expert_intermediate_size", 0, 0, max_ffn);
    moe.shared_gate = moe.shared_ffn > 0 && json.boolean_or("shared_expert_gate", false);
    moe.latent = json.integer_or("moe_latent_size", 0, 0, max_hidden);
    moe.expert_bias = biases;
    moe.shared_bias = biases && moe.shared_ffn > 0;
    moe.probs_on_input = json.boolean_or("probs_on_input", false);
    model::Router& router = moe.router;
    const bool softmax = is_first(json, "scoring_func", "softmax", "sigmoid");
    router.scoring = softmax ? model::Scoring::softmax : model::Scoring::sigmoid;
    router.normalize = says(json, "norm_topk_prob", true);
    router.scale = json.number_or("routed_scaling_factor", 1.0, 0.0, 1e6);
    router.groups = integer_or(json, "n_group", 1, 1, max_experts);
    router.groups_kept = integer_or(json, "topk_group", 1, 1, max_experts);
    router.group_score_top = std::max(1, moe.top_k / router.groups_kept);
    router.expert_bias = json.string_or("topk_method", "greedy") == "noaux_tc";
    return moe;
}

// Layers differ in their reach, their rotation and the kind of their MLP, and in whether their attention is linear.
void read_blocks(const JsonObject& json, model::Model& model, bool linear_bias, double rotary) {
    read_common(json, model, 1e-5, 10000.0);
    model.layer_norm = model.layer_norm_bias = is_first(json, "normalization", "LayerNorm", "RMSNorm");
    model.rope_interleaved = json.has("kv_lora_rank");
    const int layers = layer_count(json);
    const std::vector<bool> none(static_cast<std::size_t>(layers), false), all(none.size(), true);
    const bool experts = json.has("n_routed_experts"), mlp_bias = json.boolean_or("mlp_bias", linear_bias);
    const std::vector<bool> sparse = experts ? layers_with_experts(json, 0) : none;
    const std::vector<bool> linear = layers_of_type(json, "linear_attention", layers, none);
    const std::int64_t window = json.integer_or("sliding_window", 0, 0, max_window);
    const std::vector<bool> sliding = window > 0 ? layers_of_type(json, "sliding_attention", layers, all) : none;
    const std::vector<bool> rotates = json.has("no_rope_layers") ? flags(json, "no_rope_layers", layers) : all;
    model::LayerKind kind;
    kind.activation = read_activation(json, "gelu");
    kind.gated = json.boolean_or("mlp_gated", false);
    kind.swiglu_limit = json.number_or("swiglu_limit", 0.0, 0.0, 1e6);
    const model::Attention full = read_softmax(json, model, json.boolean_or("attention_bias", linear_bias), rotary);
    for (std::size_t layer = 0; layer < sparse.size(); ++layer) {
        kind.attention = linear[layer] ? read_gated_delta(json) : full;
        if (sliding[layer]) kind.attention.window = window;
        if (!rotates[layer]) kind.attention.rope_dim = 0;
        kind.moe.reset();
        if (sparse[layer]) kind.moe = read_block_experts(json, mlp_bias);
        kind.dense_ffn = sparse[layer] ? 0 : ffn(json, "intermediate_size");
        kind.mlp_bias = !sparse[layer] && mlp_bias;
        add_layer(model, kind);
    }
    repeat_last_as_mtp(json, model);
}

} // namespace

void read_megatron_gpt(const JsonObject& json, model::Model& model) { read_blocks(json, model, false, 1.0); }

void read_gpt3(const JsonObject& json, model::Model& model) {
    read_blocks(json, model, true, 0.0);
    model.not_executable = "positions are learned (GPT-3): only rotations are trained yet";
}

} // namespace moe::families
