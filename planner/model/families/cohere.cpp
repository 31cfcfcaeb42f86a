// Cohere's Command models: attention and MLP read one norm and are added at once; LayerNorm without a bias, tied
// embeddings, logits by a factor. Command R7B and A have windows that turn and full layers that do not; the later ones
// experts.
#include "planner/model/families/families.hpp"
#include "planner/model/families/parts.hpp"

namespace moe::families {
namespace {

// Experts as wide as intermediate_size; the chosen logits alone are scored.
model::Moe read_command_experts(const JsonObject& json, model::Model& model) {
    model::Moe moe;
    moe.experts = integer(json, "num_experts", max_experts);
    moe.top_k = integer(json, "num_experts_per_tok", max_experts);
    moe.ffn = ffn(json, "intermediate_size");
    moe.shared_ffn = moe.ffn * json.integer_or("num_shared_experts", 0, 0, 1024);
    const std::string score = json.string_or("expert_selection_fn", "softmax");
    if (score != "softmax" && score != "sigmoid")
        json.refuse_value("expert_selection_fn", "must be softmax or sigmoid");
    const bool normalizes = says(json, "norm_topk_prob", true);
    moe.router.scoring = score == "softmax" ? model::Scoring::softmax : model::Scoring::sigmoid;
    moe.router.softmax_after_top_k = score == "softmax";
    moe.router.normalize = score == "sigmoid" && normalizes;
    const std::string joins = json.string_or("shared_expert_combination_strategy", "average");
    if (joins != "average" && joins != "sum")
        json.refuse_value("shared_expert_combination_strategy", "must be average or sum");
    if (joins == "average" && moe.shared_ffn > 0)
        model.not_executable = "shared_expert_combination_strategy = average: not trained yet";
    return moe;
}

// The layers with windows, of a step that is counted anew behind the first dense layers.
std::vector<bool> command_windows(const JsonObject& json, int dense, int layers) {
    const int step = integer_or(json, "sliding_window_pattern", 4, 1, max_layers),
              before = integer_or(json, "prefix_dense_sliding_window_pattern", 1, 1, max_layers);
    std::vector<bool> list;
    for (int layer = 0; layer < layers; ++layer)
        list.push_back(layer < dense ? (layer + 1) % before != 0 : (layer - dense + 1) % step != 0);
    return layers_of_type(json, "sliding_attention", layers, list);
}

} // namespace

void read_cohere(const JsonObject& json, model::Model& model) {
    const bool first = model.architecture == "CohereForCausalLM",
               routed = model.architecture == "Cohere2MoeForCausalLM";
    read_common(json, model, 1e-5, first ? 500000.0 : 10000.0);
    model.tied_embeddings = says(json, "tie_word_embeddings", true);
    model.logit_scale = json.number_or("logit_scale", 0.0625, 1e-9, 1e6);
    model.layer_norm = !(routed && json.has("rms_norm_eps"));
    model.rope_interleaved = true;
    pass_over(json, {"cache_implementation", "order_of_interleaved_layers", "rotary_pct", "position_embedding_type",
                     "use_embedding_sharing", "use_gated_activation", "use_parallel_block", "use_parallel_embedding"});
    const int layers = layer_count(json);
    model::LayerKind kind;
    kind.parallel = true;
    kind.activation = read_activation(json, "silu");
    model::Attention full = read_gqa(json, model);
    full.qkv_bias = full.out_bias = json.boolean_or("attention_bias", false);
    if (json.boolean_or("use_qk_norm", false)) {
        full.qk_norm = full.whole_qk_norm = true;
        model.not_executable = "use_qk_norm = true: LayerNorm of queries and keys is not trained yet";
    }
    if (!routed) refuse_experts(json, model);
    const int dense = routed ? integer_or(json, "first_k_dense_replace", 0, 0, max_layers) : layers;
    const std::vector<bool> sparse =
        routed && json.is_array("mlp_layer_types") ? sparse_of_types(json, layers) : after(dense, layers);
    const std::vector<bool> sliding =
        first ? std::vector<bool>(sparse.size()) : command_windows(json, routed ? dense : 0, layers);
    const bool turns_dense = routed && integer_or(json, "prefix_dense_sliding_window_pattern", 1, 1, max_layers) == 1;
    const std::int64_t window = first ? 0 : json.integer_or("sliding_window", 4096, 1, max_window);
    model::Moe moe;
    if (routed) moe = read_command_experts(json, model);
    const char* wide =
        routed && json.has("prefix_dense_intermediate_size") ? "prefix_dense_intermediate_size" : "intermediate_size";
    for (std::size_t layer = 0; layer < sparse.size(); ++layer) {
        model::LayerKind here = kind;
        here.attention = full;
        if (sliding[layer]) here.attention.window = window;
        if (!first && !sliding[layer] && (sparse[layer] || !turns_dense)) here.attention.rope_dim = 0;
        if (sparse[layer])
            here.moe = moe;
        else
            here.dense_ffn = ffn(json, wide);
        add_layer(model, here);
    }
}

} // namespace moe::families
