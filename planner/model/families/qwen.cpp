// The Qwen family: Qwen2 and Qwen3, dense and with experts, and Qwen3-Next and Qwen3.5 with their linear attention.
#include "planner/base/error.hpp"
#include "planner/model/families/families.hpp"
#include "planner/model/families/parts.hpp"

namespace moe::families {
namespace {

// The width of windows, 0: none, which holds unless use_sliding_window. A file that is silent means the classes' own.
std::int64_t qwen_window(const JsonObject& json) {
    const bool none = json.states("sliding_window") && !json.has("sliding_window");
    if (none || !json.boolean_or("use_sliding_window", false)) return 0;
    return json.integer_or("sliding_window", 4096, 1, max_window);
}

// Gives the window to the layers marked.
void set_windows(std::vector<model::LayerKind>& kinds, const std::vector<bool>& sliding, std::int64_t window) {
    for (std::size_t layer = 0; layer < kinds.size(); ++layer)
        if (sliding[layer]) kinds[layer].attention.window = window;
}

// Where layer_types is silent, dense models have windows from max_window_layers on, and Qwen2-MoE in every second layer
// before (transformers 5.24, configuration_qwen2.py and configuration_qwen2_moe.py).
void set_listed_windows(const JsonObject& json, std::vector<model::LayerKind>& kinds, bool in_turns) {
    const auto layers = static_cast<int>(kinds.size());
    const int bound = integer_or(json, "max_window_layers", 28, 0, max_layers);
    std::vector<bool> fallback;
    for (int layer = 0; layer < layers; ++layer)
        fallback.push_back(in_turns ? layer < bound && layer % 2 == 0 : layer >= bound);
    set_windows(kinds, layers_of_type(json, "sliding_attention", layers, fallback), qwen_window(json));
}

void read_qwen_dense(const JsonObject& json, model::Model& model, bool third_generation) {
    read_common(json, model, 1e-6, 10000.0);
    refuse_experts(json, model);
    model::LayerKind kind;
    kind.attention = read_gqa(json, model);
    kind.attention.qk_norm = third_generation;
    kind.attention.qkv_bias = third_generation ? json.boolean_or("attention_bias", false) : true;
    kind.attention.out_bias = third_generation && kind.attention.qkv_bias;
    kind.dense_ffn = ffn(json, "intermediate_size");
    kind.activation = read_activation(json, "silu");
    std::vector<model::LayerKind> kinds(static_cast<std::size_t>(layer_count(json)), kind);
    set_listed_windows(json, kinds, false);
    for (const model::LayerKind& layer : kinds) add_layer(model, layer);
}

} // namespace

void read_qwen2(const JsonObject& json, model::Model& model) { read_qwen_dense(json, model, false); }
void read_qwen3(const JsonObject& json, model::Model& model) { read_qwen_dense(json, model, true); }

namespace {

// Routed experts of the Qwen family, and the shared expert with its sigmoid gate where there is one.
model::Moe read_qwen_experts(const JsonObject& json, bool shared, bool normalize) {
    model::Moe moe;
    // transformers 5 writes Qwen3-MoE's count under the name that its experts' code uses.
    const bool renamed = !json.has("num_experts") && json.has("num_local_experts");
    moe.experts = integer(json, renamed ? "num_local_experts" : "num_experts", max_experts);
    moe.top_k = integer(json, "num_experts_per_tok", max_experts);
    moe.ffn = ffn(json, "moe_intermediate_size");
    moe.router.normalize = says(json, "norm_topk_prob", normalize);
    if (!shared) return moe;
    moe.shared_ffn = json.integer("shared_expert_intermediate_size", 0, max_ffn);
    moe.shared_gate = moe.shared_ffn > 0;
    return moe;
}

// The layers that hold experts: every decoder_sparse_step-th, less mlp_only_layers.
std::vector<bool> qwen_sparse_layers(const JsonObject& json, int layers) {
    const int step = integer_or(json, "decoder_sparse_step", 1, 1, max_layers);
    std::vector<bool> sparse(static_cast<std::size_t>(layers));
    for (int layer = 0; layer < layers; ++layer) sparse[static_cast<std::size_t>(layer)] = (layer + 1) % step == 0;
    if (!json.has("mlp_only_layers")) return sparse;
    for (const std::int64_t layer : json.integers("mlp_only_layers", 0, layers - 1))
        sparse[static_cast<std::size_t>(layer)] = false;
    return sparse;
}

std::vector<model::LayerKind> qwen_layers(const JsonObject& json, const model::Attention& attention,
                                          const model::Moe& moe) {
    std::vector<model::LayerKind> kinds;
    for (const bool sparse : qwen_sparse_layers(json, layer_count(json))) {
        model::LayerKind& kind = kinds.emplace_back();
        kind.attention = attention;
        kind.activation = read_activation(json, "silu");
        if (sparse)
            kind.moe = moe;
        else
            kind.dense_ffn = ffn(json, "intermediate_size");
    }
    return kinds;
}

} // namespace

void read_qwen2_moe(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    model::Attention attention = read_gqa(json, model);
    attention.qkv_bias = says(json, "qkv_bias", true);
    std::vector<model::LayerKind> kinds = qwen_layers(json, attention, read_qwen_experts(json, true, false));
    set_listed_windows(json, kinds, true);
    for (const model::LayerKind& kind : kinds) add_layer(model, kind);
    repeat_last_as_mtp(json, model);
}

namespace {

// A window is every layer's.
void read_third_moe(const JsonObject& json, model::Model& model, bool normalize) {
    read_common(json, model, 1e-6, 10000.0);
    model::Attention attention = read_gqa(json, model);
    attention.qk_norm = true;
    attention.qkv_bias = attention.out_bias = json.boolean_or("attention_bias", false);
    std::vector<model::LayerKind> kinds = qwen_layers(json, attention, read_qwen_experts(json, false, normalize));
    set_windows(kinds, std::vector<bool>(kinds.size(), true), qwen_window(json));
    for (const model::LayerKind& kind : kinds) add_layer(model, kind);
    repeat_last_as_mtp(json, model);
}

} // namespace

void read_qwen3_moe(const JsonObject& json, model::Model& model) { read_third_moe(json, model, false); }

// Qwen3-VL's class divides by the sum whatever a file says, and Qwen3-Omni's where it is silent.
void read_qwen3_vl_moe(const JsonObject& json, model::Model& model) {
    if (!says(json, "norm_topk_prob", true)) json.refuse_value("norm_topk_prob", "only true is known beside towers");
    read_third_moe(json, model, true);
}

namespace {

// Gated delta net on three layers of four, gated softmax attention on the fourth, before experts or dense MLPs.
void read_hybrid(const JsonObject& json, model::Model& model, bool has_experts) {
    read_common(json, model, 1e-6, 10000.0);
    model::Attention full = read_gqa(json, model, 0.25);
    full.qk_norm = true;
    full.output_gate = says(json, "attn_output_gate", true);
    full.qkv_bias = full.out_bias = json.boolean_or("attention_bias", false);
    if (full.qkv_bias && full.output_gate)
        json.refuse_value("attention_bias", "only false is known beside gates in the projection of queries");
    model.norms_from_one = true;
    const model::Attention linear = read_gated_delta(json);
    std::vector<model::LayerKind> kinds;
    if (has_experts) {
        kinds = qwen_layers(json, full, read_qwen_experts(json, true, true));
    } else {
        model::LayerKind kind;
        kind.attention = full;
        kind.activation = read_activation(json, "silu");
        kind.dense_ffn = ffn(json, "intermediate_size");
        kinds.assign(static_cast<std::size_t>(layer_count(json)), kind);
    }
    std::vector<bool> is_linear;
    const int interval = integer_or(json, "full_attention_interval", 4, 1, max_layers);
    for (std::size_t layer = 0; layer < kinds.size(); ++layer)
        is_linear.push_back((static_cast<int>(layer) + 1) % interval != 0);
    is_linear = layers_of_type(json, "linear_attention", static_cast<int>(kinds.size()), is_linear);
    for (std::size_t layer = 0; layer < kinds.size(); ++layer) {
        if (is_linear[layer]) kinds[layer].attention = linear;
        add_layer(model, kinds[layer]);
    }
    if (json.has("mtp_num_hidden_layers")) return repeat_last_as_mtp(json, model, "mtp_num_hidden_layers"); // Qwen3.5
    repeat_last_as_mtp(json, model);
}

} // namespace

void read_qwen3_next(const JsonObject& json, model::Model& model) { read_hybrid(json, model, true); }

// The dense models of Qwen3.5 and 3.6.
void read_qwen3_5(const JsonObject& json, model::Model& model) {
    refuse_experts(json, model);
    read_hybrid(json, model, false);
}

} // namespace moe::families
