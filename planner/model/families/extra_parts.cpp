// Families of 2025 and 2026 with a part more than others have: queries of a latent (Step-3), small experts that groups
// share (GroveMoE), keys picked by blocks (MiniMax-M3), gates with a bias (Beam), experts of attention (JetMoE).
// Counted and priced, not trained.
#include "planner/base/error.hpp"
#include "planner/model/families/families.hpp"
#include "planner/model/families/opaque_parts.hpp"
#include "planner/model/families/parts.hpp"

#include <algorithm>
#include <charconv>

namespace moe::families {
namespace {

// Indices of layers as a list, or as text with commas.
std::vector<bool> listed_layers(const JsonObject& json, const std::string& key, int layers,
                                const std::vector<bool>& fallback) {
    if (!json.has(key)) return fallback;
    std::vector<bool> list(static_cast<std::size_t>(layers));
    if (!json.is_string(key)) {
        for (const std::int64_t layer : json.integers(key, 0, layers - 1)) list[static_cast<std::size_t>(layer)] = true;
        return list;
    }
    const std::string text = json.string(key);
    for (const char *at = text.data(), *end = at + text.size(); at < end;) {
        int layer = -1;
        const auto [next, fault] = std::from_chars(at, end, layer);
        if (fault != std::errc() || layer < 0 || layer >= layers || (next != end && *next != ','))
            json.refuse_value(key, fmt::format("must be indices of the {} layers, with commas between them", layers));
        list[static_cast<std::size_t>(layer)] = true;
        at = next == end ? end : next + 1;
    }
    return list;
}

// The part of a list of zeros and ones that older files keep in an object of another name.
std::vector<bool> picking_layers(const JsonObject& json, const JsonObject& sparse, int layers) {
    if (json.is_array("layer_types"))
        return layers_that_are(json, "layer_types", "minimax_m3_sparse", "full_attention", layers);
    if (sparse.is_array("sparse_attention_freq")) return flags(sparse, "sparse_attention_freq", layers);
    return std::vector<bool>(static_cast<std::size_t>(layers));
}

} // namespace

// Step-3: multi-matrix factorization attention, a latent of queries with a norm beside one key and one value.
void read_step3(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-5, 500000.0);
    model::LayerKind kind;
    kind.attention = read_gqa(json, model);
    kind.attention.kv_heads = integer_or(json, "num_attention_groups", kind.attention.kv_heads, 1, max_heads);
    kind.attention.q_lora = integer(json, "share_q_dim", max_hidden);
    kind.activation = read_activation(json, "silu");
    model::Moe moe;
    moe.experts = integer(json, "moe_num_experts", max_experts);
    moe.top_k = integer(json, "moe_top_k", max_experts);
    moe.ffn = ffn(json, "moe_intermediate_size");
    moe.shared_ffn = json.integer_or("share_expert_dim", moe.ffn, 0, max_ffn);
    moe.router.normalize = json.boolean_or("norm_expert_weight", false);
    const int layers = layer_count(json);
    const std::vector<bool> all(static_cast<std::size_t>(layers), true);
    for (const bool sparse : listed_layers(json, "moe_layers_enum", layers, all)) {
        model::LayerKind here = kind;
        if (sparse)
            here.moe = moe;
        else
            here.dense_ffn = ffn(json, "intermediate_size");
        add_layer(model, here);
    }
    pass_over(json, {"moe_every_n_layer", "use_moe", "intermediate_size", "need_fp32_gate", "moe_layer_offset",
                     "max_position_embedding", "moe_dynamic_exp_p", "max_pos_interp_ratio", "alibi_slopes"});
    model.not_executable = "share_q_dim: queries of a latent beside plain keys are not trained yet";
}

// GroveMoE: Qwen3-MoE with an expert of parallel_expert_intermediate_size for each group of routed ones, and a bias
// that selects.
void read_grove(const JsonObject& json, model::Model& model) {
    read_qwen3_moe(json, model);
    const std::int64_t width = json.integer_or("parallel_expert_intermediate_size", 128, 1, max_ffn);
    const int size = integer_or(json, "num_experts_per_group", 2, 1, max_experts);
    pass_over(json, {"parallel_expert_shared_weight", "parallel_expert_weight"});
    if (width % size != 0)
        json.refuse_value("parallel_expert_intermediate_size",
                          fmt::format("must be a multiple of num_experts_per_group = {}", size));
    for (model::LayerKind& kind : model.kinds) {
        if (!kind.moe) continue;
        if (kind.moe->experts % size != 0)
            json.refuse_value("num_experts_per_group", fmt::format("must divide num_experts = {}", kind.moe->experts));
        kind.moe->ffn += width / size;
        kind.moe->group_ffn = width;
        kind.moe->group_size = size;
        kind.moe->router.expert_bias = true;
    }
    model.not_executable = "parallel_expert_intermediate_size: experts that groups share are not trained yet";
}

// MiniMax-M3: in some layers an indexer scores all keys and attention sees the best blocks of them.
void read_minimax_m3(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 5e6);
    const JsonObject sparse = json.is_object("sparse_attention_config") ? json.object("sparse_attention_config") : json;
    const auto index_size = [&](const char* name, const char* older, int fallback, std::int64_t high) {
        return integer_or(sparse.has(older) ? sparse : json, sparse.has(older) ? older : name, fallback, 1, high);
    };
    const int layers = layer_count(json);
    model::LayerKind kind;
    kind.attention = read_gqa(json, model, 1.0);
    kind.attention.rope_dim = integer_or(json, "rotary_dim", 64, 0, max_dim);
    kind.attention.qk_norm = true;
    model::Attention picking = kind.attention;
    const std::int64_t heads = index_size("index_n_heads", "sparse_num_index_heads", 4, max_heads),
                       width = index_size("index_head_dim", "sparse_index_dim", 128, max_dim);
    const int block = index_size("index_block_size", "sparse_block_size", 128, 1 << 20),
              blocks = index_size("index_topk_blocks", "sparse_topk_blocks", 16, 1 << 10);
    pass_over(json, {"dense_intermediate_size", "index_local_blocks", "swiglu_alpha", "hidden_act",
                     "mtp_num_hidden_layers", "num_mtp_modules", "use_gemma_norm", "qk_norm_type", "use_qk_norm"});
    pass_over(sparse, {"sparse_local_block", "sparse_attention_freq"});
    picking.indexer_top_k = block * blocks;
    const auto scores = static_cast<double>(heads * width);
    picking.opaque =
        opaque_part("an indexer of blocks", {model.hidden * (heads + 1) * width, 2 * width, 0, 0.0, scores});
    model::Moe moe;
    moe.experts = integer(json, "num_local_experts", max_experts);
    moe.top_k = integer(json, "num_experts_per_tok", max_experts);
    moe.ffn = ffn(json, "intermediate_size");
    moe.shared_ffn = json.integer_or("shared_intermediate_size", 3072, 0, max_ffn);
    moe.router.scoring = model::Scoring::sigmoid;
    moe.router.expert_bias = moe.router.normalize = true;
    moe.router.scale = json.number_or("routed_scaling_factor", 2.0, 0.0, 1e6);
    kind.swiglu_limit = kind.shared_limit = json.number_or("swiglu_limit", 7.0, 0.0, 1e6);
    const std::vector<bool> picks = picking_layers(json, sparse, layers), experts = layers_with_experts(json, 0);
    for (std::size_t layer = 0; layer < picks.size(); ++layer) {
        model::LayerKind here = kind;
        if (picks[layer]) here.attention = picking;
        if (experts[layer])
            here.moe = moe;
        else
            here.dense_ffn = json.integer_or("dense_intermediate_size", 12288, 1, max_ffn);
        add_layer(model, here);
    }
    model.not_executable = "swiglu_alpha: MiniMax-M3's norms, bounds and block-sparse attention are not trained yet";
}

// JetMoE: queries and the output of each of the chosen experts of attention, over keys and values that all share. Their
// sizes are those of num_experts_per_tok experts side by side; the others lie idle.
void read_jetmoe(const JsonObject& json, model::Model& model) {
    read_common(json, model, 1e-6, 10000.0);
    model.tied_embeddings = says(json, "tie_word_embeddings", true);
    must_be(json, "activation_function", "silu");
    model::LayerKind kind;
    model::Moe& moe = kind.moe.emplace();
    moe.experts = integer(json, "num_local_experts", max_experts);
    moe.top_k = integer(json, "num_experts_per_tok", max_experts);
    moe.ffn = ffn(json, "intermediate_size");
    moe.router.softmax_after_top_k = true;
    model::Attention& attention = kind.attention;
    attention.kv_heads = integer(json, "num_key_value_heads", max_heads);
    attention.heads = attention.kv_heads * moe.top_k;
    attention.qk_dim = attention.v_dim = attention.rope_dim =
        integer_or(json, spelled(json, "kv_channels", "head_dim"), 128, 1, max_dim);
    pass_over(json, {"num_attention_heads", "head_dim", "applied_capacity"});
    const std::int64_t expert = 2 * model.hidden * attention.kv_heads * attention.qk_dim;
    // Vectors are the router of attention and a bias behind each sum of experts.
    model::OpaquePart others =
        opaque_part("experts of attention", {0, (moe.experts - moe.top_k) * expert + (moe.experts + 2) * model.hidden});
    others.idle = (moe.experts - moe.top_k) * expert;
    attention.opaque = others;
    for (int layers = layer_count(json); layers > 0; --layers) add_layer(model, kind);
}

} // namespace moe::families
