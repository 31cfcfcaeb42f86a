// Kimi-Linear: layers of Kimi delta attention, a gated delta net whose decay and output gate come from latents, and of
// latent attention that turns nothing, over DeepSeek's kind of experts. Kimi-K3 adds an output gate, experts that work
// in a latent, and residuals that attend to earlier layers.
#include "planner/base/error.hpp"
#include "planner/model/families/families.hpp"
#include "planner/model/families/opaque_parts.hpp"
#include "planner/model/families/parts.hpp"

namespace moe::families {
namespace {

// A size under transformers' name, or in the object of the published file.
int linear_size(const JsonObject& json, const std::string& name, const std::string& published, std::int64_t high) {
    if (json.has(name) || !json.is_object("linear_attn_config")) return integer(json, name, high);
    return integer(json.object("linear_attn_config"), published, high);
}

model::Attention read_delta(const JsonObject& json, std::int64_t hidden) {
    DeltaByChannel delta;
    delta.heads = linear_size(json, "linear_num_heads", "num_heads", max_heads);
    delta.width = linear_size(json, "linear_head_dim", "head_dim", max_dim);
    delta.taps = linear_size(json, "linear_conv_kernel_dim", "short_conv_kernel_size", 1024);
    if (json.is_object("linear_attn_config")) { // Kimi-K3
        const JsonObject linear = json.object("linear_attn_config");
        delta.whole_gate = linear.boolean_or("use_full_rank_gate", false);
        pass_over(linear, {"gate_lower_bound"});
    }
    return opaque_mixer(delta_by_channel(hidden, delta));
}

// The published file lists the layers of each kind, counted from 1.
std::vector<bool> delta_layers(const JsonObject& json, int layers) {
    if (json.has("layer_types") || !json.is_object("linear_attn_config"))
        return layers_that_are(json, "layer_types", "linear_attention", "full_attention", layers);
    std::vector<bool> delta(static_cast<std::size_t>(layers));
    for (const std::int64_t layer : json.object("linear_attn_config").integers("kda_layers", 1, layers))
        delta[static_cast<std::size_t>(layer - 1)] = true;
    return delta;
}

} // namespace

void read_kimi_linear(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 10000.0);
    must_be(json, "moe_router_activation_func", "sigmoid");
    pass_over(json, {"use_grouped_topk"}); // groups stand in num_expert_group
    if (!says(json, "mla_use_nope", true)) json.refuse_value("mla_use_nope", "only true is known");
    if (json.is_object("linear_attn_config")) pass_over(json.object("linear_attn_config"), {"full_attn_layers"});
    model::Moe moe;
    moe.experts = integer(json, "num_experts", max_experts);
    moe.top_k = integer(json, "num_experts_per_token", max_experts);
    moe.ffn = ffn(json, "moe_intermediate_size");
    moe.shared_ffn = moe.ffn * json.integer_or("num_shared_experts", 1, 0, 1024);
    moe.router = selecting_router(json, "moe_renormalize", "routed_scaling_factor", 2.446);
    moe.router.groups = integer_or(json, "num_expert_group", 1, 1, max_experts);
    if (json.has("routed_expert_hidden_size")) moe.latent = json.integer("routed_expert_hidden_size", 1, max_hidden);
    model::Attention delta = read_delta(json, model.hidden);
    model::Attention full = read_mla(json);
    full.qkv_bias = full.out_bias = json.boolean_or("attention_bias", false);
    if (json.boolean_or("mla_use_output_gate", false))
        join(full.opaque, opaque_part("an output gate", {model.hidden * full.heads * full.v_dim}));
    if (json.has("attn_res_block_size")) { // a norm and a row of weights before attention, before MLPs and at the end
        const model::OpaquePart residuals = opaque_part("attention residuals", {0, 4 * model.hidden});
        join(full.opaque, residuals);
        join(delta.opaque, residuals);
        model.other_weights = 2 * model.hidden;
        json.integer("attn_res_block_size", 1, max_layers);
    }
    const bool latent_norm = json.boolean_or("latent_moe_use_norm", false);
    pass_over(json, {"activation_situ_beta", "activation_situ_linear_beta"});
    const std::vector<bool> is_delta = delta_layers(json, layer_count(json)), sparse = layers_with_experts(json, 1);
    for (std::size_t layer = 0; layer < is_delta.size(); ++layer) {
        model::LayerKind kind;
        kind.activation = read_activation(json, "silu");
        kind.attention = is_delta[layer] ? delta : full;
        if (sparse[layer]) {
            kind.moe = moe;
            if (latent_norm) join(kind.attention.opaque, opaque_part("a norm of latents", {0, moe.latent}));
        } else {
            kind.dense_ffn = ffn(json, "intermediate_size");
        }
        add_layer(model, kind);
    }
    repeat_last_as_mtp(json, model);
}

} // namespace moe::families
