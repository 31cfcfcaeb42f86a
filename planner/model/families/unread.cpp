// Tells fields that only say how a model was made or is served from those that may change what it computes.
#include "planner/model/families/unread.hpp"

#include "planner/base/error.hpp"

#include <algorithm>
#include <array>
#include <string_view>

namespace moe::families {
namespace {

// Parts of names of fields about files, tokens, the beginning of weights, losses, caches and serving.
constexpr std::array parts{
    "_token_id",     "_token_index",    "_loss_coef",    "aux_loss",     "_dtype",
    "dropout",       "initializer",     "transformers_", "use_cache",    "cache_",
    "output_router", "output_hidden",   "output_a",      "pretraining_", "num_logits_to",
    "quantization_", "max_position",    "max_seq",       "model_max",    "use_mamba_kernels",
    "time_step_",    "rescale_prenorm", "_capacity",     "_overlap",     "mrope_",
    "_fp32",         "router_z",        "checkpoint",
};

// The same, whole; and sizes that many files carry whose layers have others.
constexpr auto names = std::to_array<std::string_view>({
    "_name_or_path",
    "_sliding_window_pattern",
    "mm_tokens_per_image",
    "architectures",
    "auto_map",
    "chunk_size_feed_forward",
    "dtype",
    "ep_size",
    "expand",
    "first_k_dense_replace",
    "head_dim",
    "id2label",
    "init_method",
    "intermediate_size",
    "intermediate_size_mlp",
    "is_encoder_decoder",
    "label2id",
    "lm_head",
    "max_window_layers",
    "megatron",
    "model_type",
    "moe_intermediate_size",
    "name",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "param_counts",
    "problem_type",
    "qk_head_dim",
    "return_dict",
    "rm_head",
    "seq_aux",
    "source",
    "torch_dtype",
    "unsloth_version",
});

bool is_inert(std::string_view key) {
    if (key.ends_with("_id") || key.ends_with("_ids")) return true; // of tokens
    return std::find(names.begin(), names.end(), key) != names.end() ||
           std::any_of(parts.begin(), parts.end(),
                       [key](const char* part) { return key.find(part) != std::string_view::npos; });
}

// Whether some kind of layer has what the field says, which the reader has from elsewhere or which the architecture is
// known to have.
bool says_what_is(const JsonObject& text, const std::string& key, const model::Model& model) {
    const auto any = [&model](const auto& fact) { return std::any_of(model.kinds.begin(), model.kinds.end(), fact); };
    const auto routes = [&any](const auto& fact) {
        return any([&fact](const model::LayerKind& kind) { return kind.moe && fact(*kind.moe); });
    };
    if (key == "scoring_func") {
        const std::string word = text.string(key);
        return routes([&word](const model::Moe& moe) {
            return word == (moe.router.scoring == model::Scoring::softmax   ? "softmax"
                            : moe.router.scoring == model::Scoring::sigmoid ? "sigmoid"
                                                                            : "sqrtsoftplus");
        });
    }
    const bool experts = routes([](const model::Moe&) { return true; });
    if (key.starts_with("num_experts_per_to") && !experts) return true;
    if (key == "num_experts" || key == "n_routed_experts")
        return routes(
            [experts = text.integer(key, 1, 1 << 30)](const model::Moe& moe) { return moe.experts == experts; });
    if (key == "n_shared_experts" || key == "num_shared_experts")
        return routes([shared = text.integer(key, 1, 1 << 30)](const model::Moe& moe) {
            return moe.shared_ffn == shared * moe.ffn || (shared == 1 && moe.shared_gate);
        });
    if (key == "shared_expert_intermediate_size")
        return routes([wide = text.integer(key, 1, 1 << 30)](const model::Moe& moe) { return moe.shared_ffn == wide; });
    if (key == "mlp_bias") return routes([](const model::Moe& moe) { return moe.expert_bias; });
    if (key == "attention_bias") return any([](const model::LayerKind& kind) { return kind.attention.qkv_bias; });
    if (key == "attention_sinks") return any([](const model::LayerKind& kind) { return kind.attention.sinks; });
    if (key == "attention_output_gate" || key == "attn_output_gate")
        return any([](const model::LayerKind& kind) { return kind.attention.output_gate; });
    if (key == "use_qk_norm" || key == "qk_norm")
        return any([](const model::LayerKind& kind) { return kind.attention.qk_norm; });
    return false;
}

bool agrees(const JsonObject& text, const std::string& key, const model::Model& model) {
    try {
        return says_what_is(text, key, model);
    } catch (const Error&) { // of another type than the field has elsewhere
        return false;
    }
}

} // namespace

std::vector<std::string> unread_of(const JsonObject& text, const model::Model& model) {
    std::vector<std::string> unread;
    const std::vector<std::string> unasked = text.unasked();
    for (const std::string& key : text.keys()) {
        if (is_inert(key) || std::find(model.left_out.begin(), model.left_out.end(), key) != model.left_out.end())
            continue;
        if (std::find(unasked.begin(), unasked.end(), key) != unasked.end()) {
            if (!agrees(text, key, model)) unread.push_back(key);
        } else if (text.is_object(key)) {
            for (const std::string& inner : text.object(key).unasked())
                if (!is_inert(inner)) unread.push_back(key + "." + inner);
        }
    }
    return unread;
}

} // namespace moe::families
