// Families of one attention in all layers over DeepSeek's kind of experts: Solar-Open, Hunyuan 3 and Mistral 4.
#include "planner/base/error.hpp"
#include "planner/model/families/families.hpp"
#include "planner/model/families/parts.hpp"

#include <algorithm>

namespace moe::families {
namespace {

void add_plain_layers(const JsonObject& json, model::Model& model, const model::Attention& attention,
                      const model::Moe& moe, int first_dense) {
    for (const bool here : layers_with_experts(json, first_dense)) {
        model::LayerKind kind;
        kind.attention = attention;
        kind.activation = read_activation(json, "silu");
        if (here)
            kind.moe = moe;
        else
            kind.dense_ffn = ffn(json, "intermediate_size");
        add_layer(model, kind);
    }
    repeat_last_as_mtp(json, model);
}

} // namespace

// GLM-4.5 with experts in every layer and whole heads turned.
void read_solar_open(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 1e6);
    model::Attention attention = read_gqa(json, model);
    attention.qkv_bias = json.boolean_or("attention_bias", false);
    model::Moe moe = read_experts(json, "n_routed_experts", "n_shared_experts", 1);
    moe.router = selecting_router(json, "norm_topk_prob", "routed_scaling_factor", 1.0);
    add_plain_layers(json, model, attention, moe, 0);
}

void read_hy_v3(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 11158840.0);
    model::Attention attention = read_gqa(json, model);
    attention.qk_norm = says(json, "qk_norm", true);
    attention.qkv_bias = attention.out_bias = json.boolean_or("attention_bias", false);
    model::Moe moe = read_experts(json, "num_experts", "num_shared_experts", 1);
    moe.router = selecting_router(json, "route_norm", "router_scaling_factor", 2.826);
    moe.router.expert_bias = says(json, "moe_router_enable_expert_bias", true);
    if (json.boolean_or("mlp_bias", false)) json.refuse_value("mlp_bias", "only false is known of Hunyuan 3");
    if (moe.shared_ffn == 0) json.refuse_value("num_shared_experts", "must be at least 1");
    if (!says(json, "moe_router_use_sigmoid", true)) json.refuse_value("moe_router_use_sigmoid", "only true is known");
    add_plain_layers(json, model, attention, moe, 1);
}

// Latent attention, and a softmax over all experts of which the chosen are divided by their sum.
void read_mistral4(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    model.rope_interleaved = says(json, "rope_interleave", true);
    model::Attention attention = read_mla(json);
    attention.qkv_bias = attention.out_bias = json.boolean_or("attention_bias", false);
    need_rotation(json);
    attention.query_scale = read_query_scale(json, model);
    model::Moe moe = read_experts(json, "n_routed_experts", "n_shared_experts", 1);
    moe.router = selecting_router(json, "norm_topk_prob", "routed_scaling_factor", 1.0);
    moe.router.scoring = model::Scoring::softmax;
    moe.router.expert_bias = false;
    add_plain_layers(json, model, attention, moe, 0);
}

} // namespace moe::families
