// Families whose layers see a window of the sequence or all of it, in a pattern: MiMo-V2, Step-3.5, AFMoE (Trinity) and
// EXAONE-MoE.
#include "planner/base/error.hpp"
#include "planner/model/families/families.hpp"
#include "planner/model/families/parts.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

namespace moe::families {
namespace {

// Tells of each layer whether its attention has a window, and whether it has experts.
struct Pattern {
    std::vector<bool> sliding, sparse;
};

// Every layer but each `step`-th.
std::vector<bool> all_but_every(int step, int layers) {
    std::vector<bool> list;
    for (int layer = 0; layer < layers; ++layer) list.push_back((layer + 1) % step != 0);
    return list;
}

void add_pattern(model::Model& model, const Pattern& pattern, const model::LayerKind& base,
                 const model::Attention& full, const model::Attention& window, const model::Moe& moe,
                 std::int64_t dense_ffn) {
    for (std::size_t layer = 0; layer < pattern.sliding.size(); ++layer) {
        model::LayerKind kind = base;
        kind.attention = pattern.sliding[layer] ? window : full;
        if (pattern.sparse[layer])
            kind.moe = moe;
        else
            kind.dense_ffn = dense_ffn;
        add_layer(model, kind);
    }
}

// Layers of windows have heads of their own. A file of transformers 5 names their number of key/value heads nowhere:
// its class takes twice those of the other layers.
model::Attention read_mimo_attention(const JsonObject& json, model::Model& model, bool sliding) {
    const auto size = [&](const std::string& key, std::int64_t high) {
        return integer(json, sliding && json.has("swa_" + key) ? "swa_" + key : key, high);
    };
    model::Attention attention;
    attention.heads = size("num_attention_heads", max_heads);
    attention.kv_heads = size("num_key_value_heads", max_heads / 2);
    if (sliding && !json.has("swa_num_key_value_heads")) attention.kv_heads *= 2;
    attention.qk_dim = size("head_dim", max_dim);
    attention.v_dim = size("v_head_dim", max_dim);
    attention.qkv_bias = json.boolean_or("attention_bias", false);
    const double top = json.number_or("partial_rotary_factor", 0.334, 0.0, 1.0);
    const double share = rotary_share(json, sliding ? "sliding_attention" : "full_attention", top, top);
    const bool flash = json.string_or("model_type", "mimo_v2_flash") == "mimo_v2_flash";
    const double silent = flash && !json.states("attention_value_scale") ? 0.707 : 1.0;
    attention.value_scale = json.number_or("attention_value_scale", silent, 1e-9, 1e6);
    attention.rope_dim = static_cast<int>(attention.qk_dim * share) / 2 * 2;
    if (const int turned = static_cast<int>(attention.qk_dim * share); turned % 2 != 0)
        model.not_executable =
            fmt::format("partial_rotary_factor: {} columns turn, which must be an even number", turned);
    attention.sinks = sliding ? says(json, "add_swa_attention_sink_bias", true)
                              : json.boolean_or("add_full_attention_sink_bias", false);
    // The published field counts the positions before the query.
    if (sliding)
        attention.window = json.has("sliding_window_size") ? json.integer("sliding_window_size", 1, max_window) + 1
                                                           : json.integer("sliding_window", 1, max_window);
    return attention;
}

} // namespace

// A depth of MTP has a window and a dense MLP. The published V2-Flash holds three depths and mentions none.
void read_mimo_v2(const JsonObject& json, model::Model& model) {
    read_common(json, model, json.number_or("layernorm_epsilon", 1e-5, 0.0, 1.0), 5e6);
    must_be(json, "scoring_func", "sigmoid");
    must_be(json, "topk_method", "noaux_tc");
    const int layers = layer_count(json);
    Pattern pattern;
    if (json.has("hybrid_layer_pattern"))
        pattern.sliding = flags(json, "hybrid_layer_pattern", layers);
    else if (json.has("layer_types"))
        pattern.sliding = layers_of_type(json, "sliding_attention", layers, {});
    else
        refuse("{}: field \"hybrid_layer_pattern\" is missing", json.place());
    pattern.sparse =
        json.has("mlp_layer_types") ? sparse_of_types(json, layers) : flags(json, "moe_layer_freq", layers);
    model::LayerKind base;
    base.activation = read_activation(json, "silu");
    model::Moe moe = read_experts(json, "n_routed_experts", "n_shared_experts", 0);
    moe.router = selecting_router(json, "norm_topk_prob", "routed_scaling_factor", 1.0);
    model::Attention window = read_mimo_attention(json, model, true);
    window.rope = model::Rope{json.number_or("swa_rope_theta", 10000.0, 1.0, 1e12), {}};
    const std::int64_t wide = ffn(json, "intermediate_size");
    model::Attention full = read_mimo_attention(json, model, false);
    full.rope = rope_of_type(json, "full_attention", 5e6);
    if (const auto own = rope_of_type(json, "sliding_attention", 10000.0)) window.rope = own;
    add_pattern(model, pattern, base, full, window, moe, wide);
    model::LayerKind depth = base;
    depth.attention = window;
    depth.dense_ffn = wide;
    const int depths = integer_or(json, "num_nextn_predict_layers", 0, 0, 64);
    for (int i = 0; i < depths; ++i) add_mtp(model, depth);
}

namespace {

// Step-3.5 lists its layers with experts in one string, "3,4,5", or as numbers.
std::vector<bool> read_step_sparse(const JsonObject& json, int layers) {
    if (json.is_array("mlp_layer_types")) return sparse_of_types(json, layers);
    const std::string key = "moe_layers_enum";
    std::vector<std::int64_t> indices;
    if (json.is_array(key)) {
        indices = json.integers(key, 0, layers - 1);
    } else {
        std::string text = json.string(key);
        std::erase(text, ' ');
        for (const char *at = text.data(), *end = at + text.size(); at < end;) {
            int index = 0;
            const auto [next, fault] = std::from_chars(at, end, index);
            if (fault != std::errc() || index < 0 || index >= layers || (next < end && *next != ','))
                json.refuse_value(key, fmt::format("must list indices below num_hidden_layers = {}", layers));
            indices.push_back(index);
            at = next < end ? next + 1 : end;
        }
    }
    std::vector<bool> sparse(static_cast<std::size_t>(layers));
    for (const std::int64_t index : indices) sparse[static_cast<std::size_t>(index)] = true;
    return sparse;
}

model::Attention read_step_attention(const JsonObject& sizes, const JsonObject& json) {
    model::Attention attention;
    attention.heads = integer(sizes, "num_attention_heads", max_heads);
    attention.kv_heads =
        integer(sizes, sizes.has("num_attention_groups") ? "num_attention_groups" : "num_key_value_heads", max_heads);
    attention.qk_dim = attention.v_dim = attention.rope_dim =
        integer(sizes.has("head_dim") ? sizes : json, "head_dim", max_dim);
    attention.qk_norm = says(json, "use_qk_norm", true);
    attention.head_gate = says(json, "use_head_wise_attn_gate", true);
    attention.sinks = json.boolean_or("sink", false);
    const double scalar = json.number_or("query_pre_attn_scalar", attention.qk_dim, 1e-9, 1e9);
    if (scalar != attention.qk_dim) attention.scale = 1.0 / std::sqrt(scalar);
    return attention;
}

// The words of the published files and those of the class in transformers 5.24 (configuration_step3p7.py).
std::int64_t step_size(const JsonObject& json, const char* published, const char* own, std::int64_t high) {
    return json.integer(json.has(published) ? published : own, 1, high);
}

// The attention of layers that see everything and of those with windows. The rotation of each is that of its layers,
// which the published file lists one by one; its scaling is of the former alone.
std::pair<model::Attention, model::Attention> read_step_attentions(const JsonObject& json,
                                                                   const std::vector<std::string>& types) {
    const std::string other = "attention_other_setting", sliding = "sliding_attention";
    model::Attention full = read_step_attention(json, json);
    model::Attention window = json.is_object(other) ? read_step_attention(json.object(other), json) : full;
    if (json.is_object(other)) must_be(json.object(other), "attention_type", sliding);
    if (json.has("num_sliding_attention_heads")) window.heads = integer(json, "num_sliding_attention_heads", max_heads);
    window.window = json.integer("sliding_window", 1, max_window);
    full.rope = rope_of_type(json, "full_attention", 10000.0).value_or(model::Rope{});
    window.rope = rope_of_type(json, sliding, 10000.0).value_or(model::Rope{});
    for (model::Attention* of : {&full, &window}) {
        const std::string type = of == &full ? "full_attention" : sliding;
        of->rope_dim = static_cast<int>(of->qk_dim * rotary_share(json, type, 1.0));
    }
    if (json.is_object("rope_parameters")) return {full, window};
    if (json.has("rope_scaling")) full.rope = read_rope(json.object("rope_scaling"), json, 10000.0);
    const auto each = [&](const char* key, double low, double high, const auto& set) {
        const std::vector<double> list = json.numbers(key, low, high);
        for (std::size_t layer = 0; layer < std::min(list.size(), types.size()); ++layer)
            set(types[layer] == sliding ? window : full, list[layer]);
    };
    const double theta = json.is_array("rope_theta") ? 10000.0 : json.number_or("rope_theta", 10000.0, 1.0, 1e12);
    full.rope->theta = window.rope->theta = theta;
    if (json.is_array("rope_theta"))
        each("rope_theta", 1.0, 1e12, [](model::Attention& of, double value) { of.rope->theta = value; });
    if (json.has("partial_rotary_factors"))
        each("partial_rotary_factors", 0.0, 1.0,
             [](model::Attention& of, double share) { of.rope_dim = static_cast<int>(of.qk_dim * share); });
    return {full, window};
}

// A bound for each layer, 0: none. The list may go on over the depths of MTP.
std::vector<double> read_step_limits(const JsonObject& json, const std::string& key, std::size_t layers) {
    std::vector<double> list = json.has(key) ? json.numbers(key, 0.0, 1e6) : std::vector<double>();
    if (json.has(key) && list.size() < layers)
        json.refuse_value(key, fmt::format("must have an entry for each of the {} layers", layers));
    list.resize(std::max(list.size(), layers));
    return list;
}

} // namespace

// Layers of windows have more query heads, and turn all of each; the others half. The list of layer_types goes on over
// the depths of MTP, whose MLPs are dense. Dense MLPs are bounded as shared experts are.
void read_step3p5(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 10000.0);
    must_be(json, "att_impl_type", "GQA");
    must_be(json, "hidden_act", "silu");
    for (const char* bias : {"attention_bias", "mlp_bias"})
        if (json.boolean_or(bias, false)) json.refuse_value(bias, "only false is known of Step-3.5");
    must_be(json, "moe_router_activation", "sigmoid");
    model.norms_from_one = true;
    const int layers = layer_count(json), depths = integer_or(json, "num_nextn_predict_layers", 0, 0, 64);
    const auto within = static_cast<std::size_t>(layers), whole = within + static_cast<std::size_t>(depths);
    const std::vector<std::string> types = json.strings("layer_types");
    if (types.size() < within || types.size() > whole)
        json.refuse_value("layer_types", fmt::format("must have an entry for each of the {} layers, and may have one "
                                                     "for each of the {} MTP layers",
                                                     layers, depths));
    const auto attentions = read_step_attentions(json, types);
    const auto attention = [&](std::size_t layer) {
        const bool sees_all = layer < types.size() && types[layer] == "full_attention";
        return sees_all ? attentions.first : attentions.second;
    };
    model::LayerKind base;
    base.limit_behind = true;
    model::Moe moe;
    moe.experts = static_cast<int>(step_size(json, "moe_num_experts", "n_routed_experts", max_experts));
    moe.top_k = static_cast<int>(step_size(json, "moe_top_k", "num_experts_per_tok", max_experts));
    moe.ffn = ffn(json, "moe_intermediate_size");
    moe.shared_ffn = json.integer("share_expert_dim", 0, max_ffn);
    moe.router = selecting_router(json, "norm_expert_weight", "moe_router_scaling_factor", 1.0);
    moe.router.expert_bias = says(json, "use_moe_router_bias", true);
    const std::int64_t wide = ffn(json, "intermediate_size");
    const std::vector<bool> sparse = read_step_sparse(json, layers);
    const std::vector<double> limits = read_step_limits(json, "swiglu_limits", within),
                              shared = read_step_limits(json, "swiglu_limits_shared", within);
    for (std::size_t layer = 0; layer < whole; ++layer) {
        model::LayerKind kind = base;
        kind.attention = attention(layer);
        if (layer < within && sparse[layer]) {
            kind.moe = moe;
            kind.swiglu_limit = limits[layer];
            kind.shared_limit = shared[layer];
        } else {
            kind.dense_ffn = wide;
            kind.swiglu_limit = layer < shared.size() ? shared[layer] : 0.0;
        }
        if (layer < within)
            add_layer(model, kind);
        else
            add_mtp(model, kind);
    }
}

// Arcee's Trinity: gated attention, norms on both sides of attention and MLP; layers that see everything turn nothing.
void read_afmoe(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 10000.0);
    must_be(json, "score_func", "sigmoid");
    model.post_norms = true;
    const int layers = layer_count(json);
    Pattern pattern;
    pattern.sliding =
        layers_of_type(json, "sliding_attention", layers,
                       all_but_every(integer_or(json, "global_attn_every_n_layers", 4, 1, max_layers), layers));
    pattern.sparse = after(integer_or(json, "num_dense_layers", 1, 0, max_layers), layers);
    integer(json, "head_dim", max_dim); // The field has no default that follows from other sizes.
    model::Attention full = read_gqa(json, model);
    full.qk_norm = full.output_gate = true;
    full.qkv_bias = full.out_bias = json.boolean_or("attention_bias", false);
    if (json.boolean_or("mup_enabled", false)) model.embedding_scale = std::sqrt(static_cast<double>(model.hidden));
    model::Attention window = full;
    window.window = json.integer_or("sliding_window", 1024, 1, max_window);
    full.rope_dim = 0;
    model::LayerKind base;
    base.activation = read_activation(json, "silu");
    model::Moe moe = read_experts(json, "num_experts", "num_shared_experts", 2);
    moe.router = selecting_router(json, "route_norm", "route_scale", 1.0);
    add_pattern(model, pattern, base, full, window, moe, ffn(json, "intermediate_size"));
}

namespace {

// "LLLG" over and over, where the last layer sees everything, or the step between layers that do.
std::vector<bool> read_exaone_windows(const JsonObject& json, int layers) {
    const std::string key = "sliding_window_pattern";
    if (json.is_array("layer_types")) return layers_of_type(json, "sliding_attention", layers, {});
    std::vector<bool> sliding;
    if (json.is_string(key)) {
        const std::string pattern = json.string(key);
        if (pattern.empty() || pattern.find_first_not_of("LG") != std::string::npos)
            json.refuse_value(key, "must be made of L (local) and G (global)");
        for (std::size_t layer = 0; layer < static_cast<std::size_t>(layers); ++layer)
            sliding.push_back(pattern[layer % pattern.size()] == 'L');
        sliding.back() = false;
    } else {
        sliding = all_but_every(integer_or(json, key, 4, 1, max_layers), layers);
    }
    return sliding;
}

} // namespace

// K-EXAONE: the experts of DeepSeek-V3; layers that see everything turn nothing.
void read_exaone_moe(const JsonObject& json, model::Model& model) {
    // layer_types and is_moe_layer stand beside them.
    pass_over(json, {"sliding_window_pattern", "first_last_k_dense_replace"});
    read_common(json, model, 1e-5, 10000.0);
    must_be(json, "scoring_func", "sigmoid");
    must_be(json, "topk_method", "noaux_tc");
    const int layers = layer_count(json);
    Pattern pattern{read_exaone_windows(json, layers), {}};
    if (json.has("mlp_layer_types")) {
        pattern.sparse = sparse_of_types(json, layers);
    } else if (json.has("is_moe_layer")) { // The field is as first published.
        pattern.sparse = json.booleans("is_moe_layer");
        check_length(json, "is_moe_layer", pattern.sparse.size(), layers);
    } else {
        pattern.sparse = after(integer_or(json, "first_k_dense_replace", 1, 0, max_layers), layers);
    }
    model::Attention full = read_gqa(json, model);
    full.qk_norm = true;
    full.qkv_bias = full.out_bias = json.boolean_or("attention_bias", false);
    model::Attention window = full;
    window.window = json.integer_or("sliding_window", 4096, 1, max_window);
    full.rope_dim = 0;
    model::LayerKind base;
    base.activation = read_activation(json, "silu");
    model::Moe moe = read_experts(json, "num_experts", "num_shared_experts", 1);
    moe.router = selecting_router(json, "norm_topk_prob", "routed_scaling_factor", 2.5);
    add_pattern(model, pattern, base, full, window, moe, ffn(json, "intermediate_size"));
    repeat_last_as_mtp(json, model);
}

} // namespace moe::families
