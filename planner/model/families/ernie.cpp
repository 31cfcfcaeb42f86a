// Families that name routed and shared experts in ways of their own: ERNIE-4.5 and Hunyuan.
#include "planner/base/error.hpp"
#include "planner/model/families/families.hpp"
#include "planner/model/families/parts.hpp"

#include <algorithm>
#include <cmath>

namespace moe::families {
namespace {

// A number for all layers, or a list with one for each.
std::vector<std::int64_t> by_layer(const JsonObject& json, const std::string& key, std::int64_t fallback, int layers,
                                   std::int64_t high) {
    if (!json.is_array(key))
        return std::vector<std::int64_t>(static_cast<std::size_t>(layers), json.integer_or(key, fallback, 0, high));
    const std::vector<std::int64_t> list = json.integers(key, 0, high);
    if (list.size() != static_cast<std::size_t>(layers))
        json.refuse_value(key, fmt::format("must have num_hidden_layers = {} entries", layers));
    return list;
}

// A scaling named "dynamic" with a fixed alpha stretches the base alone (transformers 5.24,
// modeling_hunyuan_v1_moe.py).
void stretch(const JsonObject& json, int rotary, model::Model& model) {
    for (const char* key : {"rope_scaling", "rope_parameters"}) {
        if (!json.is_object(key) || !json.object(key).has("alpha") || rotary <= 2) continue;
        const double alpha = json.object(key).number("alpha", 1.0, 1e9);
        model.rope_theta *= std::pow(alpha, rotary / (rotary - 2.0));
        model.rope_scaling = {};
    }
}

} // namespace

namespace {

// A number, or the first of a list: models that see have experts of images as well, whose numbers come second.
std::int64_t of_text(const JsonObject& json, const std::string& key, std::int64_t fallback, std::int64_t low,
                     std::int64_t high) {
    if (!json.is_array(key)) return json.integer_or(key, fallback, low, high);
    const std::vector<std::int64_t> list = json.integers(key, low, high);
    if (list.empty()) json.refuse_value(key, "must have a number for text");
    return list[0];
}

} // namespace

// Experts from moe_layer_start_index to moe_layer_end_index, the latter included; -1 = the last layer.
void read_ernie(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 500000.0);
    must_be(json, "moe_gate", "topk");
    must_be(json, "moe_gate_act", "softmax");
    pass_over(json, {"rope_3d", "freq_allocation"}); // positions of images
    if (!says(json, "moe_use_aux_free", true)) json.refuse_value("moe_use_aux_free", "only true is known");
    model.tied_embeddings = says(json, "tie_word_embeddings", true);
    model.rope_interleaved = true;
    model::LayerKind dense;
    dense.attention = read_gqa(json, model);
    dense.activation = read_activation(json, "silu");
    const bool bias = json.boolean_or("use_bias", false);
    dense.attention.qkv_bias = dense.attention.out_bias = dense.mlp_bias = model.head_bias = bias;
    model::Moe moe;
    for (const char* key : {"moe_num_experts", "moe_intermediate_size"}) {
        if (!json.has(key)) integer(json, key, 1); // refuses it as missing
        if (!json.is_array(key)) continue;
        model.left_out.push_back(fmt::format("{} of images", key));
        model.not_executable = fmt::format("{}: experts of images beside those of text are not trained yet", key);
    }
    moe.experts = static_cast<int>(of_text(json, "moe_num_experts", 0, 1, max_experts));
    moe.top_k = integer(json, "moe_k", max_experts);
    moe.ffn = of_text(json, "moe_intermediate_size", 0, 1, max_ffn);
    moe.shared_ffn = moe.ffn * json.integer_or("moe_num_shared_experts", 2, 0, 1024);
    moe.router.normalize = moe.router.expert_bias = true;
    json.number_or("moe_norm_min", 1e-12, 0.0, 1e-6); // A larger one would divide by itself.
    moe.shared_bias = bias && moe.shared_ffn > 0;
    model::LayerKind sparse = dense;
    sparse.mlp_bias = false;
    sparse.moe = moe;
    dense.dense_ffn = ffn(json, "intermediate_size");
    const int layers = layer_count(json);
    const std::int64_t first = of_text(json, "moe_layer_start_index", 1, 0, max_layers);
    const std::int64_t last = of_text(json, "moe_layer_end_index", -1, -1, max_layers);
    const int step = integer_or(json, "moe_layer_interval", 1, 1, max_layers);
    for (int layer = 0; layer < layers; ++layer) {
        const bool inside = layer >= first && (last < 0 || layer <= last);
        add_layer(model, inside && (layer + 1) % step == 0 ? sparse : dense);
    }
    repeat_last_as_mtp(json, model);
}

void read_ernie_dense(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 500000.0);
    model.tied_embeddings = says(json, "tie_word_embeddings", true);
    model.rope_interleaved = true;
    refuse_experts(json, model);
    if (json.boolean_or("use_bias", false))
        json.refuse_value("use_bias", "only false is known of ERNIE-4.5's dense models");
    model::LayerKind kind;
    kind.attention = read_gqa(json, model);
    kind.activation = read_activation(json, "silu");
    kind.dense_ffn = ffn(json, "intermediate_size");
    for (int layer = layer_count(json); layer > 0; --layer) add_layer(model, kind);
}

void read_hunyuan_dense(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 10000.0);
    refuse_experts(json, model);
    model::LayerKind kind;
    kind.attention = read_gqa(json, model);
    kind.attention.qk_norm = kind.attention.norm_behind = says(json, "use_qk_norm", true);
    kind.attention.qkv_bias = kind.attention.out_bias = json.boolean_or("attention_bias", false);
    stretch(json, kind.attention.rope_dim, model);
    kind.activation = read_activation(json, "silu");
    kind.dense_ffn = ffn(json, "intermediate_size");
    for (int layer = layer_count(json); layer > 0; --layer) add_layer(model, kind);
}

// Every layer has experts and a shared MLP as wide as intermediate_size for each of num_shared_expert.
void read_hunyuan_moe(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 10000.0);
    if (json.boolean_or("use_cla", false))
        model.not_executable = fmt::format("use_cla: keys and values that {} layers share are not trained yet; figures "
                                           "are of layers with their own",
                                           integer_or(json, "cla_share_factor", 2, 1, max_layers));
    must_be(json, "norm_type", "rms");
    if (!says(json, "use_rotary_pos_emb", true))
        json.refuse_value("use_rotary_pos_emb", "only true is known of Hunyuan");
    // Of other modules; heads are as wide as head_dim says, or as the hidden width divides.
    pass_over(json, {"attention_head_dim", "cla_share_factor", "class_num", "dense_list", "moe_drop_tokens",
                     "moe_random_routing_dropped_token", "norm_topk_prob", "num_media_embeds", "org_vocab_size",
                     "pool_type"});
    const int layers = layer_count(json);
    const std::int64_t wide = ffn(json, "intermediate_size");
    const auto experts = by_layer(json, "num_experts", 1, layers, max_experts);
    const auto chosen = by_layer(json, "moe_topk", 1, layers, max_experts);
    const auto widths = by_layer(json, "moe_intermediate_size", wide, layers, max_ffn);
    const auto shared = by_layer(json, "num_shared_expert", 1, layers, 1024);
    if (std::any_of(shared.begin(), shared.end(), [](std::int64_t count) { return count != 1; }))
        json.refuse_value("num_shared_expert", "only 1 is known"); // Transformers takes any number for it.
    const bool mixed = says(json, "use_mixed_mlp_moe", true);
    const int skipped = integer_or(json, "moe_layer_num_skipped", 0, 0, max_layers);
    model::LayerKind kind;
    kind.attention = read_gqa(json, model);
    kind.attention.qk_norm = kind.attention.norm_behind = says(json, "use_qk_norm", true);
    stretch(json, kind.attention.rope_dim, model);
    kind.attention.qkv_bias = kind.attention.out_bias = json.boolean_or("attention_bias", false);
    kind.activation = read_activation(json, "silu");
    for (std::size_t layer = 0; layer < static_cast<std::size_t>(layers); ++layer) {
        model::LayerKind here = kind;
        if (experts[layer] > 1 && static_cast<int>(layer) >= skipped) {
            model::Moe& moe = here.moe.emplace();
            moe.experts = static_cast<int>(experts[layer]);
            moe.top_k = static_cast<int>(chosen[layer]);
            moe.ffn = widths[layer];
            moe.shared_ffn = mixed ? wide : 0;
            moe.router.normalize = true;
        } else {
            here.dense_ffn = wide;
        }
        add_layer(model, here);
    }
}

} // namespace moe::families
