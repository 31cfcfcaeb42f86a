// Readers of parts that several families share.
#include "planner/model/families/parts.hpp"

#include "planner/base/error.hpp"

#include <algorithm>
#include <charconv>

namespace moe::families {

void check_length(const JsonObject& json, const std::string& key, std::size_t found, int layers) {
    if (found != static_cast<std::size_t>(layers))
        json.refuse_value(key, fmt::format("must have num_hidden_layers = {} entries, found {}", layers, found));
}

std::vector<bool> every(int step, int layers) { return one_of_each(step, step - 1, layers); }

std::vector<bool> one_of_each(int period, int offset, int layers) {
    std::vector<bool> list;
    for (int layer = 0; layer < layers; ++layer) list.push_back(layer % period == offset);
    return list;
}

std::vector<bool> after(int first, int layers) {
    std::vector<bool> list(static_cast<std::size_t>(layers), true);
    std::fill(list.begin(), list.begin() + std::min(first, layers), false);
    return list;
}

std::vector<bool> layers_that_are(const JsonObject& json, const std::string& key, const std::string& word,
                                  const std::string& other, int layers) {
    std::vector<bool> list;
    for (const std::string& entry : json.strings(key)) {
        if (entry != word && entry != other)
            json.refuse_value(key, fmt::format("must be made of {} and {}", word, other));
        list.push_back(entry == word);
    }
    check_length(json, key, list.size(), layers);
    return list;
}

std::vector<bool> sparse_of_types(const JsonObject& json, int layers) {
    return layers_that_are(json, "mlp_layer_types", "sparse", "dense", layers);
}

std::vector<bool> flags(const JsonObject& json, const std::string& key, int layers) {
    const std::vector<std::int64_t> list = json.integers(key, 0, 1);
    check_length(json, key, list.size(), layers);
    return {list.begin(), list.end()};
}

int size_of_layers(const JsonObject& json, const std::string& key, const std::vector<bool>& marked, int fallback,
                   std::int64_t high) {
    if (!json.is_object("per_layer_config")) return fallback;
    const JsonObject all = json.object("per_layer_config");
    std::vector<int> sizes(marked.size(), fallback);
    for (const std::string& name : all.keys()) {
        std::size_t layer = marked.size();
        const auto [end, fault] = std::from_chars(name.data(), name.data() + name.size(), layer);
        if (fault != std::errc() || end != name.data() + name.size() || layer >= marked.size())
            all.refuse_value(name, fmt::format("must be the index of one of the {} layers", marked.size()));
        if (all.object(name).has(key)) sizes[layer] = integer(all.object(name), key, high);
    }
    int size = fallback;
    for (std::size_t layer = 0; layer < sizes.size(); ++layer)
        if (marked[layer]) size = sizes[layer];
    for (std::size_t layer = 0; layer < sizes.size(); ++layer)
        if (sizes[layer] != (marked[layer] ? size : fallback))
            refuse("{}: per_layer_config: {} = {} of layer {}: only one size for all layers of a kind is known",
                   json.place(), key, sizes[layer], layer);
    return size;
}

std::vector<bool> layers_with_experts(const JsonObject& json, int first_dense) {
    if (json.is_array("mlp_layer_types")) return sparse_of_types(json, layer_count(json));
    const int first = integer_or(json, "first_k_dense_replace", first_dense, 0, max_layers);
    if (json.is_array("moe_layer_freq")) return flags(json, "moe_layer_freq", layer_count(json));
    const int step = integer_or(json, "moe_layer_freq", 1, 1, max_layers);
    std::vector<bool> sparse;
    for (int layer = 0; layer < layer_count(json); ++layer) sparse.push_back(layer >= first && layer % step == 0);
    return sparse;
}

std::vector<bool> layers_that_share(const JsonObject& json) {
    std::vector<bool> shared;
    const int layers = layer_count(json);
    if (json.is_array("indexer_types")) {
        shared = layers_that_are(json, "indexer_types", "shared", "full", layers);
    } else if (json.is_array("index_topk_pattern")) {
        shared = layers_that_are(json, "index_topk_pattern", "S", "F", layers);
    } else if (json.has("index_topk_pattern")) {
        const std::string key = "index_topk_pattern", pattern = json.string(key);
        if (pattern.find_first_not_of("FS") != std::string::npos || static_cast<int>(pattern.size()) != layers)
            json.refuse_value(key, fmt::format("must be {} letters, F (picks keys) or S (shares them)", layers));
        for (const char letter : pattern) shared.push_back(letter == 'S');
    } else {
        const int step = integer_or(json, "index_topk_freq", 1, 1, max_layers);
        const int offset = integer_or(json, "index_skip_topk_offset", 2, 0, max_layers);
        for (int layer = 0; layer < layers; ++layer) shared.push_back(std::max(layer - offset + 1, 0) % step != 0);
    }
    if (shared.front()) refuse("{}: the first layer cannot share the keys of one before it", json.place());
    return shared;
}

void must_be(const JsonObject& json, const std::string& key, const std::string& only) {
    if (json.has(key) && json.string(key) != only) json.refuse_value(key, "only " + only + " is known");
}

void pass_over(const JsonObject& json, std::initializer_list<const char*> keys) {
    for (const char* key : keys) json.states(key);
}

const char* spelled(const JsonObject& json, const char* name, const char* other) {
    return json.has(other) && !json.has(name) ? other : name;
}

void need_rotation(const JsonObject& json) {
    if (!json.has("rope_parameters") && !json.has("rope_scaling"))
        refuse("{}: field \"rope_parameters\" is missing: no other field gives it", json.place());
}

model::QueryScale read_query_scale(const JsonObject& json, const model::Model& model) {
    if (!json.is_object("rope_parameters")) return {};
    const JsonObject rope = json.object("rope_parameters");
    const std::int64_t positions =
        rope.integer_or("original_max_position_embeddings", model.rope_scaling.original_positions, 0, max_window);
    return {rope.number_or("llama_4_scaling_beta", 0.0, 0.0, 1e6), std::max(1.0, static_cast<double>(positions)), 0.0};
}

model::Router selecting_router(const JsonObject& json, const char* normalize, const char* scale,
                               double fallback_scale) {
    model::Router router;
    router.scoring = model::Scoring::sigmoid;
    router.expert_bias = true;
    router.normalize = says(json, normalize, true);
    router.scale = json.number_or(scale, fallback_scale, 0.0, 1e6);
    router.groups = integer_or(json, "n_group", 1, 1, max_experts);
    router.groups_kept = integer_or(json, "topk_group", 1, 1, max_experts);
    router.group_score_top = 2;
    return router;
}

double rotary_share(const JsonObject& json, const std::string& type, double fallback, double silent) {
    if (!json.is_object("rope_parameters") || !json.object("rope_parameters").is_object(type)) return fallback;
    const JsonObject rope = json.object("rope_parameters").object(type);
    if (rope.string_or("rope_type", "") == "proportional") return 1.0; // Its frequencies say which pairs turn.
    return rope.number_or("partial_rotary_factor", silent, 0.0, 1.0);
}

double read_granite_factors(const JsonObject& json, model::Model& model) {
    model.embedding_scale = json.number_or("embedding_multiplier", 1.0, 1e-9, 1e6);
    model.residual_scale = json.number_or("residual_multiplier", 1.0, 1e-9, 1e6);
    model.logit_scale = 1.0 / json.number_or("logits_scaling", 1.0, 1e-9, 1e6);
    return json.number_or("attention_multiplier", 1.0, 1e-9, 1e6);
}

model::Moe read_experts(const JsonObject& json, const char* routed, const std::string& shared,
                        std::int64_t fallback_shared) {
    model::Moe moe;
    moe.experts = integer(json, routed, max_experts);
    moe.top_k = integer(json, "num_experts_per_tok", max_experts);
    moe.ffn = ffn(json, "moe_intermediate_size");
    if (shared.empty()) return moe;
    moe.shared_ffn = moe.ffn * json.integer_or(shared, fallback_shared, 0, 1024);
    if (moe.shared_ffn > max_ffn)
        json.refuse_value(shared, fmt::format("times moe_intermediate_size = {} must not exceed {}", moe.ffn, max_ffn));
    return moe;
}

model::Attention read_gated_delta(const JsonObject& json) {
    model::Attention attention;
    attention.kind = model::AttentionKind::gated_delta;
    attention.key_heads = integer(json, "linear_num_key_heads", max_heads);
    attention.value_heads = integer(json, "linear_num_value_heads", max_heads);
    attention.key_dim = integer(json, "linear_key_head_dim", max_dim);
    attention.value_dim = integer(json, "linear_value_head_dim", max_dim);
    if (read_activation(json, "silu") != model::Activation::silu)
        json.refuse_value("hidden_act", "only silu is known of convolutions");
    attention.conv_kernel = integer_or(json, "linear_conv_kernel_dim", 4, 1, 1024);
    attention.heads = attention.value_heads;
    attention.kv_heads = attention.key_heads;
    attention.qk_dim = attention.key_dim;
    attention.v_dim = attention.value_dim;
    return attention;
}

} // namespace moe::families
