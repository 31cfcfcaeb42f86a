// What each transformer architecture adds to the common config fields: attention kind, MoE layers, router semantics.
//
// Defaults of missing fields are those of the Hugging Face configuration class of the same name (transformers 4.57);
// sizes have none: a config without its sizes is refused.
#include "planner/model_config.hpp"

#include "planner/error.hpp"
#include "planner/names.hpp"

#include <algorithm>
#include <array>

namespace moe {
namespace {

using namespace config;

int layer_count(const JsonObject& json) { return integer(json, "num_hidden_layers", max_layers); }

std::int64_t ffn(const JsonObject& json, const std::string& key) { return json.integer(key, 1, max_ffn); }

// Every MTP layer is one more layer of the last layer's kind.
void repeat_last_as_mtp(const JsonObject& json, Model& model) {
    const int count = integer_or(json, "num_nextn_predict_layers", 0, 0, 64);
    const LayerKind last = model.kinds[static_cast<std::size_t>(model.layers.back())];
    for (int depth = 0; depth < count; ++depth) add_mtp(model, last);
}

Scoring scoring_of(const JsonObject& json, const std::string& fallback) {
    const std::string name = json.string_or("scoring_func", fallback);
    if (name == "softmax") return Scoring::softmax;
    if (name == "sigmoid") return Scoring::sigmoid;
    if (name == "sqrtsoftplus") return Scoring::sqrt_softplus;
    json.refuse_value("scoring_func", "must be softmax, sigmoid or sqrtsoftplus");
}

// Llama and its dense relatives.
void read_dense(const JsonObject& json, Model& model, const Attention& attention) {
    LayerKind kind;
    kind.attention = attention;
    kind.dense_ffn = ffn(json, "intermediate_size");
    kind.activation = read_activation(json, "silu");
    kind.mlp_bias = json.boolean_or("mlp_bias", false);
    const int layers = layer_count(json);
    for (int layer = 0; layer < layers; ++layer) add_layer(model, kind);
}

void read_llama(const JsonObject& json, Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    Attention attention = read_gqa(json, model);
    attention.qkv_bias = attention.out_bias = json.boolean_or("attention_bias", false);
    read_dense(json, model, attention);
}

// The window of Qwen models: off unless use_sliding_window; then on the layers from max_window_layers on.
std::vector<LayerKind> with_qwen_windows(const JsonObject& json, std::vector<LayerKind> kinds) {
    if (!json.boolean_or("use_sliding_window", false) || !json.has("sliding_window")) return kinds;
    const auto layers = static_cast<int>(kinds.size());
    const int first = integer_or(json, "max_window_layers", 28, 0, max_layers);
    std::vector<bool> fallback(kinds.size());
    for (int layer = 0; layer < layers; ++layer) fallback[static_cast<std::size_t>(layer)] = layer >= first;
    const std::vector<bool> sliding = sliding_layers(json, layers, fallback);
    for (std::size_t layer = 0; layer < kinds.size(); ++layer) {
        if (sliding[layer]) kinds[layer].attention.window = json.integer("sliding_window", 1, max_window);
    }
    return kinds;
}

void read_qwen_dense(const JsonObject& json, Model& model, bool third_generation) {
    read_common(json, model, 1e-6, 10000.0);
    LayerKind kind;
    kind.attention = read_gqa(json, model);
    kind.attention.qk_norm = third_generation;
    kind.attention.qkv_bias = third_generation ? json.boolean_or("attention_bias", false) : true;
    kind.attention.out_bias = third_generation && kind.attention.qkv_bias;
    kind.dense_ffn = ffn(json, "intermediate_size");
    kind.activation = read_activation(json, "silu");
    const std::vector<LayerKind> kinds(static_cast<std::size_t>(layer_count(json)), kind);
    for (const LayerKind& layer : with_qwen_windows(json, kinds)) add_layer(model, layer);
}
void read_qwen2(const JsonObject& json, Model& model) { read_qwen_dense(json, model, false); }
void read_qwen3(const JsonObject& json, Model& model) { read_qwen_dense(json, model, true); }

// Routed experts of the Qwen family, and the shared expert with its sigmoid gate where there is one.
Moe read_qwen_experts(const JsonObject& json, bool shared, bool normalize) {
    Moe moe;
    moe.experts = integer(json, "num_experts", max_experts);
    moe.top_k = integer(json, "num_experts_per_tok", max_experts);
    moe.ffn = ffn(json, "moe_intermediate_size");
    moe.router.normalize = json.boolean_or("norm_topk_prob", normalize);
    if (!shared) return moe;
    moe.shared_ffn = json.integer("shared_expert_intermediate_size", 0, max_ffn);
    moe.shared_gate = moe.shared_ffn > 0;
    return moe;
}

// Which layers hold experts: every decoder_sparse_step-th, less mlp_only_layers.
std::vector<bool> qwen_sparse_layers(const JsonObject& json, int layers) {
    const int step = integer_or(json, "decoder_sparse_step", 1, 1, max_layers);
    std::vector<bool> sparse(static_cast<std::size_t>(layers));
    for (int layer = 0; layer < layers; ++layer) sparse[static_cast<std::size_t>(layer)] = (layer + 1) % step == 0;
    if (!json.has("mlp_only_layers")) return sparse;
    for (const std::int64_t layer : json.integers("mlp_only_layers", 0, layers - 1))
        sparse[static_cast<std::size_t>(layer)] = false;
    return sparse;
}

std::vector<LayerKind> qwen_layers(const JsonObject& json, const Attention& attention, const Moe& moe) {
    std::vector<LayerKind> kinds;
    for (const bool sparse : qwen_sparse_layers(json, layer_count(json))) {
        LayerKind& kind = kinds.emplace_back();
        kind.attention = attention;
        kind.activation = read_activation(json, "silu");
        if (sparse)
            kind.moe = moe;
        else
            kind.dense_ffn = ffn(json, "intermediate_size");
    }
    return kinds;
}

void read_qwen2_moe(const JsonObject& json, Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    Attention attention = read_gqa(json, model);
    attention.qkv_bias = json.boolean_or("qkv_bias", true);
    const Moe moe = read_qwen_experts(json, true, false);
    for (const LayerKind& kind : with_qwen_windows(json, qwen_layers(json, attention, moe))) add_layer(model, kind);
    repeat_last_as_mtp(json, model);
}

void read_qwen3_moe(const JsonObject& json, Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    Attention attention = read_gqa(json, model);
    attention.qk_norm = true;
    attention.qkv_bias = attention.out_bias = json.boolean_or("attention_bias", false);
    const Moe moe = read_qwen_experts(json, false, false);
    for (const LayerKind& kind : with_qwen_windows(json, qwen_layers(json, attention, moe))) add_layer(model, kind);
    repeat_last_as_mtp(json, model);
}

Attention read_gated_delta(const JsonObject& json) {
    Attention attention;
    attention.kind = AttentionKind::gated_delta;
    attention.key_heads = integer(json, "linear_num_key_heads", max_heads);
    attention.value_heads = integer(json, "linear_num_value_heads", max_heads);
    attention.key_dim = integer(json, "linear_key_head_dim", max_dim);
    attention.value_dim = integer(json, "linear_value_head_dim", max_dim);
    attention.conv_kernel = integer_or(json, "linear_conv_kernel_dim", 4, 1, 1024);
    attention.heads = attention.value_heads;
    attention.kv_heads = attention.key_heads;
    attention.qk_dim = attention.key_dim;
    attention.v_dim = attention.value_dim;
    return attention;
}

// Gated delta net on three layers of four, gated softmax attention on the fourth.
void read_qwen3_next(const JsonObject& json, Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    Attention full = read_gqa(json, model, 0.25);
    full.qk_norm = true;
    full.output_gate = true;
    const Attention linear = read_gated_delta(json);
    std::vector<LayerKind> kinds = qwen_layers(json, full, read_qwen_experts(json, true, true));
    std::vector<bool> is_linear;
    const int interval = integer_or(json, "full_attention_interval", 4, 1, max_layers);
    for (std::size_t layer = 0; layer < kinds.size(); ++layer)
        is_linear.push_back((static_cast<int>(layer) + 1) % interval != 0);
    if (json.is_array("layer_types")) {
        const std::vector<std::string> types = json.strings("layer_types");
        if (types.size() != kinds.size())
            json.refuse_value("layer_types", fmt::format("must have num_hidden_layers = {} entries", kinds.size()));
        for (std::size_t layer = 0; layer < types.size(); ++layer)
            is_linear[layer] = types[layer] == "linear_attention";
    }
    for (std::size_t layer = 0; layer < kinds.size(); ++layer) {
        if (is_linear[layer]) kinds[layer].attention = linear;
        add_layer(model, kinds[layer]);
    }
    repeat_last_as_mtp(json, model);
}

// Mixtral divides the chosen softmax weights by their sum, which equals a softmax over the chosen logits alone.
void read_mixtral(const JsonObject& json, Model& model) {
    read_common(json, model, 1e-5, 1e6);
    LayerKind kind;
    kind.attention = read_gqa(json, model);
    if (json.has("sliding_window")) kind.attention.window = json.integer("sliding_window", 1, max_window);
    kind.activation = read_activation(json, "silu");
    Moe moe;
    moe.experts = integer(json, "num_local_experts", max_experts);
    moe.top_k = integer(json, "num_experts_per_tok", max_experts);
    moe.ffn = ffn(json, "intermediate_size");
    moe.router.softmax_after_top_k = true;
    kind.moe = moe;
    const int layers = layer_count(json);
    for (int layer = 0; layer < layers; ++layer) add_layer(model, kind);
}

// Grok-1 keeps the chosen weights of the softmax over all experts as they are.
void read_grok(const JsonObject& json, Model& model) {
    read_mixtral(json, model);
    for (LayerKind& kind : model.kinds) kind.moe->router.softmax_after_top_k = false;
}

// Attention sinks and biases everywhere; every second layer sees a window; the gate is a clamped quick-GELU whatever
// hidden_act says (the field reads "silu" in the published files).
void read_gpt_oss(const JsonObject& json, Model& model) {
    read_common(json, model, 1e-5, 150000.0);
    LayerKind kind;
    kind.attention = read_gqa(json, model);
    kind.attention.qkv_bias = kind.attention.out_bias = json.boolean_or("attention_bias", true);
    kind.attention.sinks = true;
    kind.activation = Activation::quick_gelu;
    Moe moe;
    moe.experts = integer(json, "num_local_experts", max_experts);
    moe.top_k =
        integer(json, json.has("num_experts_per_tok") ? "num_experts_per_tok" : "experts_per_token", max_experts);
    moe.ffn = ffn(json, "intermediate_size");
    moe.expert_bias = true;
    moe.router.softmax_after_top_k = true;
    moe.router.linear_bias = true;
    kind.moe = moe;
    const int layers = layer_count(json);
    std::vector<bool> alternating;
    for (int layer = 0; layer < layers; ++layer) alternating.push_back(layer % 2 == 0);
    for (const bool sliding : sliding_layers(json, layers, alternating)) {
        kind.attention.window = sliding ? json.integer_or("sliding_window", 128, 1, max_window) : 0;
        add_layer(model, kind);
    }
}

// Routed and shared experts under DeepSeek's field names. `bias`: the router has a selection bias (noaux_tc).
Moe read_deepseek_experts(const JsonObject& json, const std::string& scoring, const std::string& method, bool normalize,
                          double scale) {
    Moe moe;
    moe.experts = integer(json, "n_routed_experts", max_experts);
    moe.top_k = integer(json, "num_experts_per_tok", max_experts);
    moe.ffn = ffn(json, "moe_intermediate_size");
    moe.shared_ffn = moe.ffn * json.integer_or("n_shared_experts", 0, 0, 1024);
    if (moe.shared_ffn > max_ffn)
        json.refuse_value("n_shared_experts",
                          fmt::format("times moe_intermediate_size = {} must not exceed {}", moe.ffn, max_ffn));
    Router& router = moe.router;
    router.scoring = scoring_of(json, scoring);
    router.normalize = json.boolean_or("norm_topk_prob", normalize);
    router.scale = json.number_or("routed_scaling_factor", scale, 0.0, 1e6);
    const std::string chosen = json.string_or("topk_method", method);
    if (chosen != "greedy" && chosen != "group_limited_greedy" && chosen != "noaux_tc")
        json.refuse_value("topk_method", "must be greedy, group_limited_greedy or noaux_tc");
    router.expert_bias = chosen == "noaux_tc";
    router.group_score_top = router.expert_bias ? 2 : 1;
    if (chosen != "greedy") {
        router.groups = integer_or(json, "n_group", 1, 1, max_experts);
        router.groups_kept = integer_or(json, "topk_group", router.groups, 1, max_experts);
    }
    return moe;
}

// Dense below first_k_dense_replace and where moe_layer_freq does not divide the layer's index.
void add_deepseek_layers(const JsonObject& json, Model& model, const Attention& attention, const Moe* moe,
                         int first_dense) {
    const int layers = layer_count(json);
    const int first = integer_or(json, "first_k_dense_replace", first_dense, 0, max_layers);
    const int step = integer_or(json, "moe_layer_freq", 1, 1, max_layers);
    for (int layer = 0; layer < layers; ++layer) {
        LayerKind kind;
        kind.attention = attention;
        kind.activation = read_activation(json, "silu");
        if (moe != nullptr && layer >= first && layer % step == 0)
            kind.moe = *moe;
        else
            kind.dense_ffn = ffn(json, "intermediate_size");
        add_layer(model, kind);
    }
    repeat_last_as_mtp(json, model);
}

void read_deepseek(const JsonObject& json, Model& model, bool third_generation) {
    read_common(json, model, 1e-6, 10000.0);
    model.rope_interleaved = json.boolean_or("rope_interleave", true);
    Attention attention = read_mla(json);
    attention.qkv_bias = attention.out_bias = json.boolean_or("attention_bias", false);
    Moe moe;
    const bool sparse = json.has("n_routed_experts");
    if (sparse && third_generation) moe = read_deepseek_experts(json, "sigmoid", "noaux_tc", true, 2.5);
    if (sparse && !third_generation) moe = read_deepseek_experts(json, "softmax", "greedy", false, 1.0);
    add_deepseek_layers(json, model, attention, sparse ? &moe : nullptr, third_generation ? 3 : 0);
}
void read_deepseek_v2(const JsonObject& json, Model& model) { read_deepseek(json, model, false); }
void read_deepseek_v3(const JsonObject& json, Model& model) { read_deepseek(json, model, true); }

void read_glm4_moe(const JsonObject& json, Model& model) {
    read_common(json, model, 1e-5, 10000.0);
    Attention attention = read_gqa(json, model, 0.5);
    attention.qkv_bias = json.boolean_or("attention_bias", false);
    attention.qk_norm = json.boolean_or("use_qk_norm", false);
    const Moe moe = read_deepseek_experts(json, "sigmoid", "noaux_tc", true, 1.0);
    add_deepseek_layers(json, model, attention, &moe, 1);
}

// A field of DeepSeek-V4 under its Hugging Face name, or under Megatron's in the "megatron" block.
struct V4Fields {
    const JsonObject& json;
    int integer(const std::string& name, const std::string& megatron, std::int64_t high) const {
        if (json.has(name) || !json.is_object("megatron")) return config::integer(json, name, high);
        return config::integer(json.object("megatron"), megatron, high);
    }
    std::vector<std::int64_t> ratios() const {
        if (json.has("compress_ratios") || !json.is_object("megatron")) return json.integers("compress_ratios", 0, 128);
        return json.object("megatron").integers("csa_compress_ratios", 0, 128);
    }
};

Attention read_compressed(const JsonObject& json, std::int64_t ratio) {
    const V4Fields fields{json};
    Attention attention;
    attention.kind = AttentionKind::compressed;
    attention.heads = integer(json, "num_attention_heads", max_heads);
    attention.kv_heads = 1;
    attention.qk_dim = attention.v_dim = integer(json, "head_dim", max_dim);
    attention.rope_dim = integer(json, "qk_rope_head_dim", max_dim);
    attention.q_lora = integer(json, "q_lora_rank", max_hidden);
    attention.sinks = true;
    attention.window = fields.integer("sliding_window", "csa_window_size", max_window);
    attention.out_groups = fields.integer("o_groups", "o_groups", max_heads);
    attention.out_lora = fields.integer("o_lora_rank", "o_lora_rank", max_hidden);
    attention.compress_ratio = static_cast<int>(ratio);
    if (ratio != 4) return attention; // only the finely compressed layers select their keys
    attention.indexer_heads = fields.integer("index_n_heads", "dsa_indexer_n_heads", max_heads);
    attention.indexer_dim = fields.integer("index_head_dim", "dsa_indexer_head_dim", max_dim);
    attention.indexer_top_k = fields.integer("index_topk", "dsa_indexer_topk", max_window);
    return attention;
}

void read_deepseek_v4(const JsonObject& json, Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    model.rope_interleaved = true;
    const V4Fields fields{json};
    model.residual_streams = fields.integer("hc_mult", "num_residual_streams", 64);
    const int layers = layer_count(json);
    const int depths = integer_or(json, "num_nextn_predict_layers", 0, 0, 64);
    const std::vector<std::int64_t> ratios = fields.ratios();
    if (ratios.size() < static_cast<std::size_t>(layers + depths))
        refuse("{}: compress_ratios has {} entries: must have one for each of the {} layers and {} MTP layers",
               json.place(), ratios.size(), layers, depths);
    LayerKind kind;
    kind.activation = read_activation(json, "silu");
    kind.moe = read_deepseek_experts(json, "sqrtsoftplus", "noaux_tc", true, 1.5);
    for (int layer = 0; layer < layers + depths; ++layer) {
        const std::int64_t ratio = ratios[static_cast<std::size_t>(layer)];
        if (ratio != 0 && ratio != 4 && ratio != 128)
            refuse("{}: compress_ratios[{}] = {}: must be 0, 4 or 128", json.place(), layer, ratio);
        kind.attention = read_compressed(json, ratio);
        if (layer < layers)
            add_layer(model, kind);
        else
            add_mtp(model, kind);
    }
}

// One routed expert per token weighted by a sigmoid on the expert's input, beside a shared expert of the same width.
void read_llama4(const JsonObject& json, Model& model) {
    read_common(json, model, 1e-5, 500000.0);
    model.rope_interleaved = true;
    Moe moe;
    moe.experts = integer(json, "num_local_experts", max_experts);
    moe.top_k = integer(json, "num_experts_per_tok", max_experts);
    moe.ffn = moe.shared_ffn = ffn(json, "intermediate_size");
    moe.probs_on_input = true;
    moe.router.scoring = Scoring::sigmoid;
    const int layers = layer_count(json);
    const int step = integer_or(json, "interleave_moe_layer_step", 1, 1, max_layers);
    std::vector<bool> sparse;
    for (int layer = 0; layer < layers; ++layer) sparse.push_back((layer + 1) % step == 0);
    if (json.is_array("moe_layers")) {
        std::fill(sparse.begin(), sparse.end(), false);
        for (const std::int64_t layer : json.integers("moe_layers", 0, layers - 1))
            sparse[static_cast<std::size_t>(layer)] = true;
    }
    for (const bool holds_experts : sparse) {
        LayerKind kind;
        kind.attention = read_gqa(json, model);
        kind.activation = read_activation(json, "silu");
        if (holds_experts)
            kind.moe = moe;
        else
            kind.dense_ffn = ffn(json, "intermediate_size_mlp");
        add_layer(model, kind);
    }
}

// Plain two-matrix MLPs with LayerNorm: Nemotron-4 (squared ReLU, no biases) and the GPT series (GELU).
void read_ungated(const JsonObject& json, Model& model, const std::string& activation, bool linear_bias,
                  double rotary) {
    read_common(json, model, 1e-5, 10000.0);
    model.layer_norm_bias = true;
    LayerKind kind;
    kind.attention = read_gqa(json, model, rotary);
    kind.attention.qkv_bias = kind.attention.out_bias = linear_bias;
    kind.dense_ffn = ffn(json, "intermediate_size");
    kind.activation = read_activation(json, activation);
    kind.gated = json.boolean_or("mlp_gated", false);
    kind.mlp_bias = linear_bias;
    const int layers = layer_count(json);
    for (int layer = 0; layer < layers; ++layer) add_layer(model, kind);
}
void read_nemotron(const JsonObject& json, Model& model) { read_ungated(json, model, "relu2", false, 0.5); }
void read_megatron_gpt(const JsonObject& json, Model& model) { read_ungated(json, model, "gelu", false, 1.0); }
void read_gpt3(const JsonObject& json, Model& model) { read_ungated(json, model, "gelu", true, 0.0); }

struct Family {
    const char* written;    // as "architectures" says, without remarks in parentheses
    const char* model_type; // "" = has none
    const char* architecture;
    void (*read)(const JsonObject&, Model&);
};

constexpr std::array families{
    Family{"DeepseekV2ForCausalLM", "deepseek_v2", "DeepseekV2ForCausalLM", read_deepseek_v2},
    Family{"DeepseekV3ForCausalLM", "deepseek_v3", "DeepseekV3ForCausalLM", read_deepseek_v3},
    Family{"DeepseekV4", "", "DeepseekV4ForCausalLM", read_deepseek_v4},
    Family{"DeepseekV4ForCausalLM", "deepseek_v4", "DeepseekV4ForCausalLM", read_deepseek_v4},
    Family{"GPT-3", "", "GPT-3", read_gpt3},
    Family{"Glm4MoeForCausalLM", "glm4_moe", "Glm4MoeForCausalLM", read_glm4_moe},
    Family{"GptOssForCausalLM", "gpt_oss", "GptOssForCausalLM", read_gpt_oss},
    Family{"Grok-1", "", "Grok-1", read_grok},
    Family{"Llama3-70B upcycled MoE", "", "MixtralForCausalLM", read_mixtral},
    Family{"Llama4ForCausalLM", "llama4_text", "Llama4ForCausalLM", read_llama4},
    Family{"Llama4ForConditionalGeneration", "llama4", "Llama4ForCausalLM", read_llama4},
    Family{"LlamaForCausalLM", "llama", "LlamaForCausalLM", read_llama},
    Family{"Megatron GPT", "", "Megatron GPT", read_megatron_gpt},
    Family{"MixtralForCausalLM", "mixtral", "MixtralForCausalLM", read_mixtral},
    Family{"NemotronForCausalLM", "nemotron", "NemotronForCausalLM", read_nemotron},
    Family{"Qwen2ForCausalLM", "qwen2", "Qwen2ForCausalLM", read_qwen2},
    Family{"Qwen2MoeForCausalLM", "qwen2_moe", "Qwen2MoeForCausalLM", read_qwen2_moe},
    Family{"Qwen3ForCausalLM", "qwen3", "Qwen3ForCausalLM", read_qwen3},
    Family{"Qwen3MoeForCausalLM", "qwen3_moe", "Qwen3MoeForCausalLM", read_qwen3_moe},
    Family{"Qwen3NextForCausalLM", "qwen3_next", "Qwen3NextForCausalLM", read_qwen3_next},
};

const Family& family_of(const JsonObject& json) {
    std::string written = json.string_or("model_type", "");
    const bool by_type = !json.has("architectures");
    if (by_type && written.empty()) refuse("{}: field \"architectures\" is missing", json.place());
    if (!by_type) {
        const std::vector<std::string> list = json.strings("architectures");
        if (list.empty()) json.refuse_value("architectures", "must name the architecture");
        written = list[0].substr(0, list[0].find(" ("));
    }
    if (written.starts_with("NemotronH") || written == "nemotron_h" || json.has("hybrid_override_pattern"))
        refuse("{}: architectures = \"{}\": hybrid Mamba layers are not supported", json.place(), written);
    std::vector<std::string> known;
    for (const Family& family : families) {
        if (written == (by_type ? family.model_type : family.written)) return family;
        if (!by_type || family.model_type[0] != '\0') known.emplace_back(by_type ? family.model_type : family.written);
    }
    refuse("{}: {} = \"{}\": unknown architecture{}; known are {}", json.place(),
           by_type ? "model_type" : "architectures", written, did_you_mean(written, known), fmt::join(known, ", "));
}

} // namespace

void read_family(const JsonObject& json, Model& model) {
    const Family& family = family_of(json);
    model.architecture = family.architecture;
    // Vision-language files keep the language model in text_config.
    const JsonObject text = json.is_object("text_config") ? json.object("text_config") : json;
    family.read(text, model);
    check_model(text, model);
    model.not_executable = obstacle(text, model);
}

} // namespace moe
