// Tables of the names that families give to weights, as pieces of a name that are replaced in order.
#include "planner/model/families/names.hpp"

#include <array>
#include <cstdlib>
#include <string_view>
#include <utility>

namespace moe::families {
namespace {

struct Rename {
    std::string_view architecture, from, to;
};

constexpr std::array renames{
    Rename{"AfmoeForCausalLM", "self_attn.g_proj.", "self_attn.gate_proj."},
    Rename{"AfmoeForCausalLM", "mlp.gate.e_score_correction_bias", "mlp.expert_bias"},
    Rename{"AfmoeForCausalLM", "mlp.gate.weight", "mlp.router.gate.weight"},
    Rename{"BailingMoeForCausalLM", "model.embed_tokens.", "model.word_embeddings."},
    Rename{"BailingMoeForCausalLM", "self_attn.q_norm.", "self_attn.query_layernorm."},
    Rename{"BailingMoeForCausalLM", "self_attn.k_norm.", "self_attn.key_layernorm."},
    Rename{"BailingMoeForCausalLM", "self_attn.o_proj.", "self_attn.dense."},
    Rename{"BailingMoeForCausalLM", ".self_attn.", ".attention."},
    Rename{"BailingMoeForCausalLM", "mlp.gate.e_score_correction_bias", "mlp.gate.expert_bias"},
    Rename{"BambaForCausalLM", "model.norm.", "model.final_layernorm."},
    Rename{"BambaForCausalLM", ".post_attention_layernorm.", ".pre_ff_layernorm."},
    Rename{"BambaForCausalLM", ".mlp.", ".feed_forward."},
    Rename{"DbrxForCausalLM", "model.embed_tokens.", "transformer.wte."},
    Rename{"DbrxForCausalLM", "model.norm.", "transformer.norm_f."},
    Rename{"DbrxForCausalLM", "model.layers.", "transformer.blocks."},
    Rename{"DbrxForCausalLM", ".input_layernorm.", ".norm_attn_norm.norm_1."},
    Rename{"DbrxForCausalLM", ".post_attention_layernorm.", ".norm_attn_norm.norm_2."},
    Rename{"DbrxForCausalLM", ".self_attn.o_proj.", ".norm_attn_norm.attn.out_proj."},
    Rename{"DbrxForCausalLM", ".self_attn.", ".norm_attn_norm.attn."},
    Rename{"DbrxForCausalLM", ".mlp.gate.", ".ffn.router.layer."},
    Rename{"DbrxForCausalLM", ".mlp.experts.", ".ffn.experts."},
    Rename{"Ernie4_5_MoeForCausalLM", "mlp.gate.e_score", "mlp.moe_statics.e_score"},
    Rename{"ExaoneMoeForCausalLM", "mlp.gate.e_score", "mlp.e_score"},
    Rename{"Gemma3ForCausalLM", ".pre_mlp_layernorm.", ".pre_feedforward_layernorm."},
    Rename{"Gemma3ForCausalLM", ".post_mlp_layernorm.", ".post_feedforward_layernorm."},
    Rename{"Gemma4ForCausalLM", ".pre_mlp_layernorm.", ".pre_feedforward_layernorm."},
    Rename{"Gemma4ForCausalLM", ".post_mlp_layernorm.", ".post_feedforward_layernorm."},
    Rename{"Gemma4ForCausalLM", ".mlp.gate.", ".router.proj."},
    Rename{"Gemma4ForCausalLM", ".mlp.experts.", ".experts."},
    Rename{"Gemma4ForCausalLM", ".mlp.shared_experts.", ".mlp."},
    Rename{"FlintForCausalLM", ".mlp.shared_experts.", ".mlp.shared_expert."},
    Rename{"FlintForCausalLM", ".self_attn.sinks", ".self_attn.softmax_offset"},
    Rename{"GraniteMoeForCausalLM", ".mlp.gate.", ".block_sparse_moe.router.layer."},
    Rename{"GraniteMoeForCausalLM", ".mlp.experts.", ".block_sparse_moe.experts."},
    Rename{"GraniteMoeForCausalLM", ".mlp.shared_experts.down_proj.", ".shared_mlp.output_linear."},
    Rename{"GraniteMoeForCausalLM", ".mlp.shared_experts.", ".shared_mlp."},
    Rename{"GraniteMoeForCausalLM", ".mlp.down_proj.", ".shared_mlp.output_linear."}, // without experts
    Rename{"GraniteMoeForCausalLM", ".mlp.", ".shared_mlp."},
    Rename{"HYV3ForCausalLM", "mlp.gate.e_score_correction_bias", "mlp.expert_bias"},
    Rename{"HYV3ForCausalLM", "mlp.gate.weight", "mlp.router.gate.weight"},
    Rename{"HYV3ForCausalLM", "mlp.shared_experts.", "mlp.shared_mlp."},
    Rename{"HunYuanMoEV1ForCausalLM", "mlp.gate.weight", "mlp.gate.wg.weight"},
    Rename{"HunYuanMoEV1ForCausalLM", "mlp.shared_experts.", "mlp.shared_mlp."},
    Rename{"HunYuanMoEV1ForCausalLM", "self_attn.q_norm.", "self_attn.query_layernorm."},
    Rename{"HunYuanMoEV1ForCausalLM", "self_attn.k_norm.", "self_attn.key_layernorm."},
    Rename{"LagunaForCausalLM", "mlp.gate.e_score", "mlp.experts.e_score"},
    Rename{"LagunaForCausalLM", "mlp.shared_experts.", "mlp.shared_expert."},
    Rename{"Llama4ForCausalLM", "mlp.gate.", "mlp.router."},
    Rename{"Llama4ForCausalLM", "mlp.shared_experts.", "mlp.shared_expert."},
    Rename{"Llama4ForCausalLM", ".mlp.", ".feed_forward."},
    Rename{"MiMoV2ForCausalLM", "self_attn.sinks", "self_attn.attention_sink_bias"},
    Rename{"MiniMaxM2ForCausalLM", "mlp.gate.e_score", "mlp.e_score"},
    Rename{"MiniMaxM2ForCausalLM", ".mlp.", ".block_sparse_moe."},
    Rename{"MiniMaxM2ForCausalLM", ".gate_proj.", ".w1."},
    Rename{"MiniMaxM2ForCausalLM", ".up_proj.", ".w3."},
    Rename{"MiniMaxM2ForCausalLM", ".down_proj.", ".w2."},
    Rename{"PhiMoEForCausalLM", ".mlp.", ".block_sparse_moe."},
    Rename{"PhiMoEForCausalLM", ".gate_proj.", ".w1."},
    Rename{"PhiMoEForCausalLM", ".up_proj.", ".w3."},
    Rename{"PhiMoEForCausalLM", ".down_proj.", ".w2."},
    Rename{"Step3p5ForCausalLM", ".mlp.gate.e_score_correction_bias", ".moe.router_bias"},
    Rename{"Step3p5ForCausalLM", ".mlp.gate.", ".moe.gate."},
    Rename{"Step3p5ForCausalLM", ".mlp.experts.", ".moe."},
    Rename{"Step3p5ForCausalLM", ".mlp.shared_experts.", ".share_expert."},
};

// Families whose weights go by the names of another.
std::string_view names_of(std::string_view architecture) {
    if (architecture == "BailingMoeV2ForCausalLM") return "BailingMoeForCausalLM";
    if (architecture == "GraniteMoeSharedForCausalLM" || architecture == "GraniteMoeHybridForCausalLM" ||
        architecture == "GraniteMoeSWAForCausalLM")
        return "GraniteMoeForCausalLM";
    if (architecture == "HunYuanDenseV1ForCausalLM") return "HunYuanMoEV1ForCausalLM";
    if (architecture == "Qwen3_5MoeForCausalLM") return "Qwen3_5ForCausalLM";
    return architecture;
}

std::string replaced(std::string text, std::string_view from, std::string_view to) {
    const std::size_t at = text.find(from);
    return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

// The layer that a parameter belongs to; nullptr: none.
const model::LayerKind* kind_of(const model::Model& model, const std::string& name) {
    const std::string marker = "model.layers.";
    if (!name.starts_with(marker)) return nullptr;
    const auto layer = static_cast<std::size_t>(std::strtoul(name.c_str() + marker.size(), nullptr, 10));
    const std::size_t layers = model.layers.size();
    if (layer >= layers + model.mtp.size()) return nullptr;
    return &model.kinds[static_cast<std::size_t>(layer < layers ? model.layers[layer] : model.mtp[layer - layers])];
}

bool has_delta_layers(std::string_view family) {
    return family == "Qwen3NextForCausalLM" || family == "Qwen3_5ForCausalLM";
}

// Multi-token prediction of Qwen3-Next and Qwen3.5 is a module beside the layers.
std::string qwen_mtp_name(const model::Model& model, const std::string& name) {
    const std::string at = "model.layers." + std::to_string(model.layers.size()) + ".";
    if (model.mtp.empty() || !name.starts_with(at)) return name;
    std::string rest = name.substr(at.size());
    for (const auto& [ours, theirs] : {std::pair{"enorm.", "pre_fc_norm_embedding."},
                                       {"hnorm.", "pre_fc_norm_hidden."},
                                       {"eh_proj.", "fc."},
                                       {"shared_head.norm.", "norm."}})
        if (rest.starts_with(ours)) return "mtp." + replaced(rest, ours, theirs);
    return "mtp.layers.0." + rest;
}

// The parts of a projection that Qwen3-Next keeps head by head and Qwen3.5 one behind another; and queries with gates.
JoinedRows joined_delta(const model::Model& model, const model::Attention& a, const std::string& name) {
    const std::size_t at = name.rfind('.', name.size() - std::string("weight").size() - 2) + 1;
    const std::string leaf = name.substr(at, name.size() - at - std::string(".weight").size());
    const auto in = [&](const char* matrix, std::int64_t first, std::int64_t rows) {
        return JoinedRows{checkpoint_name(model, name.substr(0, at) + matrix + ".weight"), first, rows};
    };
    const auto by_heads = [](JoinedRows rows, std::int64_t run, std::int64_t stride) {
        rows.run = run, rows.stride = stride;
        return rows;
    };
    if (a.kind == model::AttentionKind::gqa && a.output_gate && (leaf == "q_proj" || leaf == "g_proj"))
        return by_heads(in("q_proj", leaf == "q_proj" ? 0 : a.qk_dim, std::int64_t{2} * a.heads * a.qk_dim), a.qk_dim,
                        std::int64_t{2} * a.qk_dim);
    if (a.kind != model::AttentionKind::gated_delta) return {};
    const std::int64_t keys = std::int64_t{a.key_heads} * a.key_dim, values = std::int64_t{a.value_heads} * a.value_dim;
    const std::size_t part = leaf.empty() ? std::string::npos : std::string("qkvzba").find(leaf.back());
    const std::int64_t behind[] = {0, keys, 2 * keys};
    if (leaf.starts_with("conv1d_")) {
        JoinedRows conv = in("conv1d", behind[part], 2 * keys + values);
        conv.middle = true;
        return conv;
    }
    if (!leaf.starts_with("in_proj_")) return {};
    if (model.architecture != "Qwen3NextForCausalLM")
        return part < 3 ? in("in_proj_qkv", behind[part], 2 * keys + values) : JoinedRows{};
    const std::int64_t share = a.value_heads / a.key_heads, value = share * a.value_dim, key = a.key_dim;
    if (part > 3) return by_heads(in("in_proj_ba", part == 4 ? 0 : share, 2LL * a.value_heads), share, 2 * share);
    const std::int64_t first[] = {0, key, 2 * key, 2 * key + value};
    return by_heads(in("in_proj_qkvz", first[part], 2 * (keys + values)), part < 2 ? key : value, 2 * (key + value));
}

// Nemotron-H calls every layer's part its mixer, and each depth of multi-token prediction is two layers of one part
// each (vLLM, nemotron_h_mtp.py).
std::string nemotron_h_name(const model::Model& model, const std::string& name) {
    std::string text = replaced(name, "model.embed_tokens.", "backbone.embeddings.");
    text = replaced(std::move(text), "model.norm.", "backbone.norm_f.");
    const std::string marker = "model.layers.";
    if (!text.starts_with(marker)) return text;
    const std::size_t dot = text.find('.', marker.size()), layers = model.layers.size();
    if (dot == std::string::npos) return text;
    const auto layer = static_cast<std::size_t>(std::strtoul(text.c_str() + marker.size(), nullptr, 10));
    std::string rest = text.substr(dot + 1);
    const bool second =
        rest.starts_with("post_attention_layernorm.") || rest.starts_with("mlp.") || rest.starts_with("shared_head.");
    for (const auto& [ours, theirs] : {std::pair{"input_layernorm.", "norm."},
                                       {"post_attention_layernorm.", "norm."},
                                       {"shared_head.norm.", "final_layernorm."},
                                       {"self_attn.", "mixer."},
                                       {"mamba.", "mixer."},
                                       {"mlp.", "mixer."}})
        if (rest.starts_with(ours)) {
            rest = replaced(std::move(rest), ours, theirs);
            break;
        }
    if (layer < layers) return "backbone.layers." + std::to_string(layer) + "." + rest;
    return "mtp.layers." + std::to_string(2 * (layer - layers) + (second ? 1 : 0)) + "." + rest;
}

// The parts of Mamba-2's projection and of its convolution: gate, x, B, C and steps; x, B and C.
JoinedRows joined_mamba(const model::Model& model, const model::Attention& a, const std::string& name) {
    const std::size_t end = name.rfind('.'), at = name.rfind('.', end - 1) + 1;
    const std::string leaf = name.substr(at, end - at);
    const std::int64_t groups = std::int64_t{a.key_heads} * a.key_dim,
                       inner = std::int64_t{a.value_heads} * a.value_dim;
    const auto in = [&](const char* whole, std::int64_t first, std::int64_t rows) {
        return JoinedRows{checkpoint_name(model, name.substr(0, at) + whole + name.substr(end)), first, rows};
    };
    const std::pair<const char*, std::int64_t> convolved[] = {{"x", 0}, {"b", inner}, {"c", inner + groups}};
    for (const auto& [part, first] : convolved) {
        if (leaf == std::string("in_proj_") + part)
            return in("in_proj", inner + first, 2 * (inner + groups) + a.value_heads);
        if (leaf != std::string("conv1d_") + part) continue;
        JoinedRows conv = in("conv1d", first, inner + 2 * groups);
        conv.middle = name.ends_with(".weight");
        return conv;
    }
    if (leaf == "in_proj_z") return in("in_proj", 0, 2 * (inner + groups) + a.value_heads);
    if (leaf == "in_proj_dt") return in("in_proj", 2 * (inner + groups), 2 * (inner + groups) + a.value_heads);
    return {};
}

// Beside towers the language model has a name of its own; MiMo-V2's and Step-3.5's lie at the top.
std::string name_beside_towers(std::string_view family, std::string name) {
    if (family == "MiMoV2ForCausalLM" || family == "Step3p5ForCausalLM") return name;
    if (family == "Llama4ForCausalLM" || family == "DeepseekV3ForCausalLM") return "language_model." + name; // Kimi-VL
    return name.starts_with("model.") ? replaced(std::move(name), "model.", "model.language_model.") : name;
}

} // namespace

std::vector<std::string> names_beside_towers(const std::string& name) {
    std::string bare = name;
    for (const auto& [from, to] : {std::pair{"model.language_model.", "model."}, std::pair{"language_model.", ""}})
        if (bare.starts_with(from)) bare = replaced(std::move(bare), from, to);
    std::vector<std::string> names{bare, "language_model." + bare, "thinker." + bare};
    if (bare.starts_with("model.")) names.push_back(replaced(bare, "model.", "model.language_model."));
    return names;
}

std::string checkpoint_name(const model::Model& model, const std::string& name) {
    std::string text = name;
    const std::string_view family = names_of(model.architecture);
    if (has_delta_layers(family)) text = qwen_mtp_name(model, text);
    if (family == "NemotronHForCausalLM") return nemotron_h_name(model, text);
    for (const Rename& rename : renames)
        if (rename.architecture == family) text = replaced(std::move(text), rename.from, rename.to);
    if (model.architecture == "GraniteMoeSWAForCausalLM")
        text = replaced(std::move(text), ".router.layer.", ".router.");
    return model.left_out.empty() ? text : name_beside_towers(family, std::move(text));
}

JoinedRows joined_rows(const model::Model& model, const std::string& name) {
    const std::string_view family = names_of(model.architecture);
    const model::LayerKind* kind = kind_of(model, name);
    if (kind == nullptr) return {};
    if (kind->attention.kind == model::AttentionKind::mamba && name.find(".mamba.") != std::string::npos)
        return joined_mamba(model, kind->attention, name);
    if (has_delta_layers(family) && name.ends_with(".weight")) return joined_delta(model, kind->attention, name);
    if (family == "GraniteMoeForCausalLM" && name.find(".experts.") == std::string::npos) {
        const std::int64_t ffn = kind->moe ? kind->moe->shared_ffn : kind->dense_ffn;
        for (const char* part : {".gate_proj.", ".up_proj."})
            if (name.find(part) != std::string::npos)
                return {checkpoint_name(model, replaced(name, part, ".input_linear.")),
                        std::string_view(part) == ".up_proj." ? ffn : 0, 2 * ffn};
    }
    const char* joined = family == "BailingMoeForCausalLM" ? "query_key_value" : "Wqkv";
    if (family != "BailingMoeForCausalLM" && family != "DbrxForCausalLM") return {};
    std::size_t part = 0, at = std::string::npos;
    const std::array projections{"q_proj.", "k_proj.", "v_proj."};
    for (; part < projections.size(); ++part)
        if ((at = name.find(projections[part])) != std::string::npos) break;
    if (at == std::string::npos) return {};
    const model::Attention& a = kind->attention;
    const std::array<std::int64_t, 3> rows{static_cast<std::int64_t>(a.heads) * a.qk_dim,
                                           static_cast<std::int64_t>(a.kv_heads) * a.qk_dim,
                                           static_cast<std::int64_t>(a.kv_heads) * a.v_dim};
    JoinedRows found{checkpoint_name(model, replaced(name, std::string(projections[part]), std::string(joined) + ".")),
                     0, rows[0] + rows[1] + rows[2]};
    for (std::size_t i = 0; i < part; ++i) found.first += rows[i];
    return found;
}

ExpertLayout expert_layout(const model::Model& model) {
    const std::string_view family = names_of(model.architecture);
    if (model.architecture == "GraniteMoeSWAForCausalLM") return ExpertLayout::fused;
    if (family == "GraniteMoeForCausalLM") return ExpertLayout::gated;
    // Qwen3.5 beside towers; its class of the language model alone saves each expert.
    if (family == "Mistral4ForCausalLM" || family == "Gemma4ForCausalLM" ||
        (family == "Qwen3_5ForCausalLM" && !model.left_out.empty()))
        return ExpertLayout::fused;
    if (family == "Llama4ForCausalLM") return ExpertLayout::transposed;
    if (family == "Step3p5ForCausalLM") return ExpertLayout::stacked;
    if (family == "DbrxForCausalLM") return ExpertLayout::rows;
    return ExpertLayout::each;
}

} // namespace moe::families
