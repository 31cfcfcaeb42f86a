// The DeepSeek family, and GLM-4.5 to GLM-5 and dots.llm1, which share its experts' field names: latent attention,
// sparse attention, groups, shared experts.
#include "planner/base/error.hpp"
#include "planner/model/families/families.hpp"
#include "planner/model/families/opaque_parts.hpp"
#include "planner/model/families/parts.hpp"

#include <algorithm>

namespace moe::families {
namespace {

model::Scoring scoring_of(const JsonObject& json, const std::string& fallback) {
    const std::string name = json.string_or("scoring_func", fallback);
    if (name == "softmax") return model::Scoring::softmax;
    if (name == "sigmoid" || name == "noaux_tc") return model::Scoring::sigmoid; // "noaux_tc" is dots.llm1's word.
    if (name == "sqrtsoftplus") return model::Scoring::sqrt_softplus;
    json.refuse_value("scoring_func", "must be softmax, sigmoid or sqrtsoftplus");
}

// Values that the configuration classes fill in where a file is silent.
struct Defaults {
    const char* scoring = "sigmoid";
    const char* method = "noaux_tc";
    std::int64_t shared = 1; // value of n_shared_experts
    double scale = 1.0;      // value of routed_scaling_factor
    int groups = 1, kept = 1;
    bool normalizes = true;  // whether norm_topk_prob is read at all: DeepSeek-V2's class does not (transformers 5.23)
    bool ling_words = false; // numbers of experts may stand under Ling's names, too
};

// Routed and shared experts under DeepSeek's field names.
model::Moe read_deepseek_experts(const JsonObject& json, const Defaults& defaults) {
    model::Moe moe;
    const bool ling = defaults.ling_words;
    moe.experts =
        integer(json, ling ? spelled(json, "n_routed_experts", "num_experts") : "n_routed_experts", max_experts);
    moe.top_k = integer(json, "num_experts_per_tok", max_experts);
    moe.ffn = ffn(json, "moe_intermediate_size");
    const char* shared = ling ? spelled(json, "n_shared_experts", "num_shared_experts") : "n_shared_experts";
    moe.shared_ffn = moe.ffn * json.integer_or(shared, defaults.shared, 0, 1024);
    if (moe.shared_ffn > max_ffn)
        json.refuse_value(shared, fmt::format("times moe_intermediate_size = {} must not exceed {}", moe.ffn, max_ffn));
    pass_over(json, {"norm_topk_prob", "n_group", "topk_group"}); // as the class and topk_method go
    model::Router& router = moe.router;
    router.scoring = scoring_of(json, defaults.scoring);
    router.normalize = defaults.normalizes && says(json, "norm_topk_prob", true);
    router.scale = json.number_or("routed_scaling_factor", defaults.scale, 0.0, 1e6);
    const std::string chosen = json.string_or("topk_method", defaults.method);
    if (chosen != "greedy" && chosen != "group_limited_greedy" && chosen != "noaux_tc")
        json.refuse_value("topk_method", "must be greedy, group_limited_greedy or noaux_tc");
    router.expert_bias = chosen == "noaux_tc";
    router.group_score_top = router.expert_bias ? 2 : 1;
    if (chosen != "greedy") {
        router.groups = integer_or(json, "n_group", defaults.groups, 1, max_experts);
        router.groups_kept = integer_or(json, "topk_group", std::min(router.groups, defaults.kept), 1, max_experts);
    }
    return moe;
}

// Whether there are experts at all. A file says of a dense model that their number is null; one that is silent has lost
// it, since the classes have a number of their own.
bool has_experts(const JsonObject& json) {
    return !json.states("n_routed_experts") ? json.integer("n_routed_experts", 1, max_experts) > 0
                                            : json.has("n_routed_experts");
}

// DeepSeek sparse attention: an indexer picks the keys that latent attention sees.
// Its queries and keys turn by halves in DeepSeek's code and by neighbouring columns in GLM's (transformers 5.24,
// modeling_deepseek_v32.py and modeling_glm_moe_dsa.py).
void read_indexer(const JsonObject& json, model::Attention& attention, int heads, bool interleaved) {
    attention.indexer_interleaved = says(json, "indexer_rope_interleave", interleaved);
    attention.indexer_heads = integer_or(json, "index_n_heads", heads, 1, max_heads);
    attention.indexer_dim = integer_or(json, "index_head_dim", 128, 1, max_dim);
    attention.indexer_top_k = integer_or(json, "index_topk", 2048, 1, max_window);
}

void add_deepseek_layers(const JsonObject& json, model::Model& model, const model::Attention& attention,
                         const model::Moe* moe, int first_dense) {
    const std::vector<bool> sparse = layers_with_experts(json, first_dense);
    const std::vector<bool> shared =
        attention.sparse() ? layers_that_share(json) : std::vector<bool>(sparse.size(), false);
    model::LayerKind kind;
    kind.activation = read_activation(json, "silu");
    kind.attention = attention;
    for (std::size_t layer = 0; layer < sparse.size(); ++layer) {
        const bool experts = moe != nullptr && sparse[layer];
        kind.attention.shares_index = shared[layer];
        kind.moe = experts ? std::optional<model::Moe>(*moe) : std::nullopt;
        kind.dense_ffn = experts ? 0 : ffn(json, "intermediate_size");
        add_layer(model, kind);
    }
    kind.attention.shares_index = false; // An MTP layer picks its own keys.
    for (int depth = integer_or(json, "num_nextn_predict_layers", 0, 0, 64); depth > 0; --depth) add_mtp(model, kind);
}

void read_deepseek(const JsonObject& json, model::Model& model, bool third_generation, int first_dense = 0) {
    read_common(json, model, 1e-6, 10000.0);
    // Language models of DeepSeek-OCR and the smallest DeepSeek-VL2 have plain heads.
    const bool latent = says(json, "use_mla", true);
    if (!latent) pass_over(json, {"qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"});
    model.rope_interleaved = latent && says(json, "rope_interleave", true);
    model::Attention attention = latent ? read_mla(json) : read_gqa(json, model);
    attention.qkv_bias = attention.out_bias = json.boolean_or("attention_bias", false);
    if (!third_generation && json.boolean_or("mlp_bias", false))
        json.refuse_value("mlp_bias", "only false is known of DeepSeek-V2");
    if (third_generation && json.has("index_topk")) read_indexer(json, attention, 64, false);
    model::Moe moe;
    const bool sparse = has_experts(json);
    if (sparse && third_generation) moe = read_deepseek_experts(json, {"sigmoid", "noaux_tc", 1, 2.5, 8, 4});
    if (sparse && !third_generation) moe = read_deepseek_experts(json, {"softmax", "greedy", 2, 1.0, 1, 1, false});
    add_deepseek_layers(json, model, attention, sparse ? &moe : nullptr, first_dense);
}

} // namespace

// DeepSeekMoE-16B: the experts of V2 under plain multi-head attention.
void read_deepseek_v1(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    model::Attention attention = read_gqa(json, model);
    attention.qkv_bias = attention.out_bias = json.boolean_or("attention_bias", false);
    const bool sparse = has_experts(json);
    const model::Moe moe = sparse ? read_deepseek_experts(json, {"softmax", "greedy", 0}) : model::Moe{};
    add_deepseek_layers(json, model, attention, sparse ? &moe : nullptr, 0);
}

// Its text's heads divide the hidden width, whatever head_dim says.
void read_deepseek_ocr2(const JsonObject& json, model::Model& model) {
    read_deepseek_v1(json, model);
    for (model::LayerKind& kind : model.kinds) {
        model::Attention& a = kind.attention;
        a.qk_dim = a.v_dim = a.rope_dim = static_cast<int>(model.hidden / a.heads);
    }
}

void read_deepseek_v2(const JsonObject& json, model::Model& model) { read_deepseek(json, model, false); }
void read_deepseek_v3(const JsonObject& json, model::Model& model) { read_deepseek(json, model, true, 3); }

void read_glm4_moe(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 10000.0);
    model::Attention attention = read_gqa(json, model, 0.5, true);
    attention.qkv_bias = json.boolean_or("attention_bias", false);
    attention.qk_norm = json.boolean_or("use_qk_norm", false);
    const model::Moe moe = read_deepseek_experts(json, {});
    add_deepseek_layers(json, model, attention, &moe, 1);
}

namespace {

// GLM-4.5's experts under DeepSeek's latent attention.
void read_latent_glm(const JsonObject& json, model::Model& model, bool picks_keys, const Defaults& defaults,
                     int first_dense) {
    read_common(json, model, 1e-5, 10000.0);
    model.rope_interleaved = says(json, "rope_interleave", true);
    model::Attention attention = read_mla(json);
    attention.qkv_bias = attention.out_bias = json.boolean_or("attention_bias", false);
    if (picks_keys) read_indexer(json, attention, 32, true);
    const model::Moe moe = read_deepseek_experts(json, defaults);
    add_deepseek_layers(json, model, attention, &moe, first_dense);
}

} // namespace

// GLM-4.7-Flash.
void read_glm4_moe_lite(const JsonObject& json, model::Model& model) {
    read_latent_glm(json, model, false, {"sigmoid", "noaux_tc", 1, 1.8}, 1);
}

// GLM-5, 5.1 and 5.2.
void read_glm_moe_dsa(const JsonObject& json, model::Model& model) {
    read_latent_glm(json, model, true, {"sigmoid", "noaux_tc", 1, 2.5}, 3);
}

void read_dots1(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    model::Attention attention = read_gqa(json, model);
    attention.qkv_bias = attention.out_bias = json.boolean_or("attention_bias", false);
    attention.qk_norm = true;
    model::Moe moe = read_deepseek_experts(json, {});
    moe.router.normalize = json.boolean_or("norm_topk_prob", false);
    const int layers = layer_count(json);
    const std::vector<bool> none(static_cast<std::size_t>(layers));
    const std::vector<bool> sliding = layers_of_type(json, "sliding_attention", layers, none);
    if (std::find(sliding.begin(), sliding.end(), true) != sliding.end())
        json.refuse_value("layer_types", "only full_attention is known of dots.llm1");
    add_deepseek_layers(json, model, attention, &moe, 0);
}

// A.X-K1: DeepSeek-V3 with a norm of the experts' sum in each layer.
void read_axk1(const JsonObject& json, model::Model& model) {
    read_deepseek(json, model, true, 1);
    for (model::LayerKind& kind : model.kinds)
        if (kind.moe) join(kind.attention.opaque, opaque_part("a norm behind experts", {0, model.hidden}));
}

// Hy-4: GLM-5's attention with sinks and gates of the output, in hyper-connections that do not mix their streams.
void read_hy_v4(const JsonObject& json, model::Model& model) {
    read_latent_glm(json, model, true, {"sigmoid", "noaux_tc", 1, 2.827}, 1);
    model.residual_streams = integer_or(json, "hc_mult", 4, 2, 64);
    model.unmixed_streams = true;
    pass_over(json, {"hc_magnitude", "hc_eps", "learnable_sink_init"});
    for (model::LayerKind& kind : model.kinds) {
        const std::int64_t heads = kind.attention.heads;
        join(kind.attention.opaque,
             opaque_part("an output gate and sinks", {model.hidden * heads * kind.attention.v_dim, heads}));
        if (kind.moe) kind.swiglu_limit = json.number_or("swiglu_limit", 10.0, 0.0, 1e6);
    }
}

// A.X-K2: DeepSeek-V3.2 whose projection of queries makes output gates as well, from a latent of twice the width, and
// whose norms before attention and experts have gates of a narrow MLP.
void read_axk2(const JsonObject& json, model::Model& model) {
    read_latent_glm(json, model, true, {"sigmoid", "noaux_tc", 1, 2.5}, 1);
    const std::int64_t narrow = 2 * model.hidden * integer_or(json, "gated_norm_rank", 16, 1, max_hidden);
    for (model::LayerKind& kind : model.kinds) {
        const model::Attention& a = kind.attention;
        const std::int64_t gates = std::int64_t{a.q_lora} * a.heads * (a.qk_dim + 2 * a.v_dim);
        join(kind.attention.opaque, opaque_part("output gates and gated norms", {gates + (kind.moe ? 2 : 1) * narrow}));
    }
}

// Tencent's Youtu-LLM: latent attention of DeepSeek-V3 without experts.
void read_youtu(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    refuse_experts(json, model);
    model.tied_embeddings = says(json, "tie_word_embeddings", true);
    model.rope_interleaved = says(json, "rope_interleave", true);
    model::LayerKind kind;
    kind.attention = read_mla(json);
    kind.attention.qkv_bias = kind.attention.out_bias = json.boolean_or("attention_bias", false);
    kind.activation = read_activation(json, "silu");
    kind.dense_ffn = ffn(json, "intermediate_size");
    for (int layer = layer_count(json); layer > 0; --layer) add_layer(model, kind);
}

// Sarvam's experts in Ling's words or GLM-4.5's, under latent attention or whole heads that turn.
void read_sarvam(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 8e6);
    const bool latent = model.architecture == "SarvamMLAForCausalLM";
    model.rope_interleaved = latent && says(json, "rope_interleave", true);
    model::Attention attention = latent ? read_mla(json) : read_gqa(json, model, 1.0);
    attention.qkv_bias = json.boolean_or(spelled(json, "attention_bias", "use_qkv_bias"), false);
    attention.out_bias = latent ? attention.qkv_bias : json.boolean_or("use_bias", false);
    attention.qk_norm = !latent && says(json, "use_qk_norm", true);
    must_be(json, "score_function", "sigmoid");
    pass_over(json, {"moe_router_enable_expert_bias", "moe_shared_expert_intermediate_size"});
    const model::Moe moe = read_deepseek_experts(json, {"sigmoid", "noaux_tc", 1, 2.5, 1, 1, true, true});
    add_deepseek_layers(json, model, attention, &moe, 1);
    model.not_executable = model.architecture + ": weights under names of their own are not read yet";
}

namespace {

// A field of DeepSeek-V4 under its Hugging Face name, or under Megatron's in the "megatron" block.
struct V4Fields {
    const JsonObject& json;
    int integer(const std::string& name, const std::string& megatron, std::int64_t high) const {
        if (json.has(name)) return families::integer(json, name, high);
        if (!json.is_object("megatron"))
            refuse("{}: field \"{}\" is missing, and so is an object \"megatron\" that may name it", json.place(),
                   name);
        return families::integer(json.object("megatron"), megatron, high);
    }
    // Of every layer, MTP's behind the decoder's. Transformers 5 names kinds, whose rates stand in an object, and is
    // silent about MTP, whose layers see their window alone in the published files.
    std::vector<std::int64_t> ratios(int depths) const {
        if (json.is_array("layer_types") && json.is_object("compress_rates")) {
            const JsonObject rates = json.object("compress_rates");
            std::vector<std::int64_t> list;
            for (const std::string& type : json.strings("layer_types"))
                list.push_back(type == "sliding_attention" ? 0 : rates.integer(type, 0, 128));
            list.insert(list.end(), static_cast<std::size_t>(depths), 0);
            return list;
        }
        if (json.has("compress_ratios") || !json.is_object("megatron")) return json.integers("compress_ratios", 0, 128);
        return json.object("megatron").integers("csa_compress_ratios", 0, 128);
    }
};

model::Attention read_compressed(const JsonObject& json, std::int64_t ratio) {
    const V4Fields fields{json};
    model::Attention attention;
    attention.kind = model::AttentionKind::compressed;
    // Values are the keys; the rest is of how streams mix and what compressed keys turn by, which no count has a part
    // of.
    pass_over(json, {"v_head_dim", "compress_rope_theta", "hc_eps", "hc_sinkhorn_iters", "partial_rotary_factor",
                     "swiglu_limit"});
    if (json.is_object("rope_parameters")) pass_over(json.object("rope_parameters"), {"main", "compress"});
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
    if (ratio != 4) return attention; // Only the finely compressed layers select their keys.
    attention.indexer_heads = fields.integer("index_n_heads", "dsa_indexer_n_heads", max_heads);
    attention.indexer_dim = fields.integer("index_head_dim", "dsa_indexer_head_dim", max_dim);
    attention.indexer_top_k = fields.integer("index_topk", "dsa_indexer_topk", max_window);
    return attention;
}

// The first layers choose experts by a table of token ids, and have no bias that selects (DeepSeek-V4, section 2.1).
std::vector<bool> layers_by_hash(const JsonObject& json, int layers) {
    if (json.is_array("mlp_layer_types")) return layers_that_are(json, "mlp_layer_types", "hash_moe", "moe", layers);
    std::vector<bool> hashed = after(integer_or(json, "num_hash_layers", 3, 0, max_layers), layers);
    hashed.flip();
    return hashed;
}

} // namespace

void read_deepseek_v4(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    model.rope_interleaved = true;
    const V4Fields fields{json};
    model.residual_streams = fields.integer("hc_mult", "num_residual_streams", 64);
    const int layers = layer_count(json);
    const int depths = integer_or(json, "num_nextn_predict_layers", 0, 0, 64);
    const std::vector<std::int64_t> ratios = fields.ratios(depths);
    if (ratios.size() < static_cast<std::size_t>(layers) + static_cast<std::size_t>(depths))
        refuse("{}: compress_ratios (megatron: csa_compress_ratios) has {} entries: must have one for each of the {} "
               "layers and {} MTP layers",
               json.place(), ratios.size(), layers, depths);
    model::LayerKind kind;
    kind.activation = read_activation(json, "silu");
    kind.moe = read_deepseek_experts(json, {"sqrtsoftplus", "noaux_tc", 1, 1.5});
    if (json.integer_or("n_shared_experts", 1, 0, 1024) != 1)
        json.refuse_value("n_shared_experts", "only 1 is known of DeepSeek-V4");
    const bool biased = kind.moe->router.expert_bias;
    const std::vector<bool> hashed = layers_by_hash(json, layers);
    for (int layer = 0; layer < layers + depths; ++layer) {
        const std::int64_t ratio = ratios[static_cast<std::size_t>(layer)];
        if (ratio != 0 && ratio != 4 && ratio != 128)
            refuse("{}: compress_ratios[{}] = {} (megatron: csa_compress_ratios): must be 0, 4 or 128", json.place(),
                   layer, ratio);
        kind.attention = read_compressed(json, ratio);
        kind.moe->router.expert_bias = biased && (layer >= layers || !hashed[static_cast<std::size_t>(layer)]);
        if (layer < layers)
            add_layer(model, kind);
        else
            add_mtp(model, kind);
    }
}

} // namespace moe::families
