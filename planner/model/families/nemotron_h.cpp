// Nemotron-H and Nemotron 3, hybrids whose layers are one part each: a Mamba-2 mixer, attention, experts or an MLP.
#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "planner/model/families/families.hpp"

#include <map>
#include <tuple>

namespace moe::families {
namespace {

model::Attention read_mamba(const JsonObject& json) {
    model::Attention mamba;
    mamba.kind = model::AttentionKind::mamba;
    mamba.value_heads = integer(json, "mamba_num_heads", max_heads);
    mamba.value_dim = integer(json, "mamba_head_dim", max_dim);
    mamba.key_heads = integer(json, "n_groups", max_heads);
    mamba.key_dim = integer(json, "ssm_state_size", max_dim);
    mamba.conv_kernel = integer_or(json, "conv_kernel", 4, 1, 1024);
    mamba.scan_chunk = integer_or(json, "chunk_size", 128, 1, 1 << 16);
    if (mamba.value_heads % mamba.key_heads != 0)
        json.refuse_value("mamba_num_heads", fmt::format("must be a multiple of n_groups = {}", mamba.key_heads));
    // What training has cut steps at (Megatron-LM, mamba_ssm). Classes of transformers 5.24 cut at time_step_min
    // instead, the least step that weights begin with.
    if (json.has("time_step_limit")) std::tie(mamba.step_min, mamba.step_max) = json.interval("time_step_limit");
    if (!says(json, "use_conv_bias", true))
        json.refuse_value("use_conv_bias", "only convolutions with a bias are known");
    for (const char* bias : {"use_bias", "mamba_proj_bias"})
        if (json.boolean_or(bias, false)) json.refuse_value(bias, "only projections without a bias are known");
    if (json.string_or("mamba_hidden_act", "silu") != "silu") json.refuse_value("mamba_hidden_act", "must be silu");
    return mamba;
}

// Attention without any rotation: the state space layers tell positions.
model::Attention read_attention(const JsonObject& json, const model::Model& model) {
    model::Attention attention = read_gqa(json, model, 0.0, true);
    // The first published files say attention_head_dim.
    const bool first = !json.has("head_dim") && json.has("attention_head_dim");
    attention.qk_dim = attention.v_dim = integer(json, first ? "attention_head_dim" : "head_dim", max_dim);
    attention.qkv_bias = attention.out_bias = json.boolean_or("attention_bias", false);
    return attention;
}

model::Moe read_experts(const JsonObject& json) {
    model::Moe moe;
    moe.experts = integer(json, "n_routed_experts", max_experts);
    moe.top_k = integer(json, "num_experts_per_tok", max_experts);
    moe.ffn = ffn(json, "moe_intermediate_size");
    moe.shared_ffn = ffn(json, "moe_shared_expert_intermediate_size"); // of all n_shared_experts
    json.states("n_shared_experts");
    if (json.has("moe_latent_size")) moe.latent = json.integer("moe_latent_size", 1, max_hidden);
    model::Router& router = moe.router;
    router.scoring = model::Scoring::sigmoid;
    router.expert_bias = true;
    router.normalize = says(json, "norm_topk_prob", true);
    router.scale = json.number_or("routed_scaling_factor", 1.0, 0.0, 1e6);
    router.groups = integer_or(json, "n_group", 1, 1, max_experts);
    router.groups_kept = integer_or(json, "topk_group", 1, 1, max_experts);
    router.group_score_top = 2;
    return moe;
}

// The kinds of layers that the letters of a pattern stand for, of those that the pattern has.
std::map<char, model::LayerKind> read_parts(const JsonObject& json, const model::Model& model,
                                            const std::string& pattern) {
    const auto has = [&pattern](char letter) { return pattern.find(letter) != std::string::npos; };
    model::LayerKind plain;
    plain.attention.kind = model::AttentionKind::none;
    // Its own name in transformers; hidden_act in older files.
    const bool own = json.has("mlp_hidden_act");
    plain.activation =
        read_activation(own ? json.with_string("hidden_act", json.string("mlp_hidden_act")) : json, "relu2");
    plain.gated = false;
    std::map<char, model::LayerKind> parts{{'M', plain}, {'*', plain}, {'E', plain}, {'-', plain}};
    if (has('M')) parts['M'].attention = read_mamba(json);
    if (has('*')) parts['*'].attention = read_attention(json, model);
    if (has('E')) parts['E'].moe = read_experts(json);
    if (has('-')) {
        parts['-'].dense_ffn = ffn(json, "intermediate_size");
        parts['-'].mlp_bias = json.boolean_or("mlp_bias", false);
    }
    return parts;
}

// The pattern as the letters of hybrid_override_pattern, or as the words that transformers writes, old and new.
std::string read_pattern(const JsonObject& json, const std::string& letters, const std::string& words) {
    if (!json.is_array(words) || json.has(letters)) return json.string(letters);
    static const std::map<std::string, char> known{{"mamba", 'M'},     {"linear_attention", 'M'},
                                                   {"attention", '*'}, {"full_attention", '*'},
                                                   {"moe", 'E'},       {"mlp", '-'}};
    std::string pattern;
    for (const std::string& word : json.strings(words)) {
        const auto letter = known.find(word);
        if (letter == known.end())
            refuse("{}: {}: \"{}\" is not known: must be mamba, attention, moe or mlp", json.place(), words,
                   shown(word));
        pattern += letter->second;
    }
    return pattern;
}

void check_pattern(const JsonObject& json, const std::string& key, const std::string& pattern) {
    const std::size_t wrong = pattern.find_first_not_of("M*E-");
    if (pattern.empty() || wrong != std::string::npos)
        json.refuse_value(key, "must be made of M (Mamba), * (attention), E (experts) and - (MLP)");
}

} // namespace

// A depth of MTP has the parts of a pattern of its own, attention and experts where it is not given.
void read_nemotron_h(const JsonObject& json, model::Model& model) {
    read_common(json, model, json.number_or("layer_norm_epsilon", 1e-5, 0.0, 1.0), 10000.0);
    model.hybrid = true;
    if (model.tied_embeddings) json.refuse_value("tie_word_embeddings", "only false is known of Nemotron-H");
    const bool in_words = !json.has("hybrid_override_pattern") && json.is_array("layers_block_type");
    const std::string key = in_words ? "layers_block_type" : "hybrid_override_pattern";
    const std::string pattern = read_pattern(json, "hybrid_override_pattern", "layers_block_type");
    check_pattern(json, key, pattern);
    // With words the list alone says how many layers there are.
    if ((!in_words || json.has("num_hidden_layers")) && static_cast<int>(pattern.size()) != layer_count(json))
        json.refuse_value(key, fmt::format("must have num_hidden_layers = {} letters", layer_count(json)));
    const int depths = integer_or(json, "num_nextn_predict_layers", 0, 0, 64);
    const bool stated = json.has("mtp_hybrid_override_pattern") || json.has("mtp_layers_block_type");
    const std::string stated_mtp =
        stated ? read_pattern(json, "mtp_hybrid_override_pattern", "mtp_layers_block_type") : "*E";
    const std::string mtp = depths > 0 ? stated_mtp : "";
    if (depths > 0 && mtp != "*E")
        json.refuse_value("mtp_hybrid_override_pattern", "must be *E, an attention layer and experts");
    const std::map<char, model::LayerKind> parts = read_parts(json, model, pattern + mtp);
    if (parts.at('E').moe && json.boolean_or("mlp_bias", false))
        json.refuse_value("mlp_bias", "only false is known beside experts");
    for (const char letter : pattern) add_layer(model, parts.at(letter));
    for (int depth = 0; depth < depths; ++depth) {
        model::LayerKind kind = parts.at('E');
        kind.attention = parts.at('*').attention;
        add_mtp(model, kind);
    }
}

} // namespace moe::families
