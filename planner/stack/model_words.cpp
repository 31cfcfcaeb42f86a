// One row for each fact of a model: read from its layers, or of the whole of it.
#include "planner/stack/model_words.hpp"

#include "planner/base/error.hpp"
#include "planner/plan/schedule.hpp"
#include "planner/stack/layer_facts.hpp"
#include "planner/stack/model_parts.hpp"

#include <algorithm>

namespace moe::stack {
namespace {

using model::Attention;
using model::AttentionKind;
using model::LayerKind;
using model::Moe;
using plan::Plan;

bool rotates(const LayerKind& k) { return softmax_attention(k) && k.attention.rope_dim > 0; }

bool stays(const LayerKind& k) { return softmax_attention(k) && k.attention.rope_dim == 0; }

// The attention of the first layer that rotates; where none does, of the first.
const Attention& attention_of(const Plan& p) {
    static const Attention none;
    const LayerKind* kind = first_kind(p, rotates);
    if (kind == nullptr) kind = first_kind(p, softmax_attention);
    return kind != nullptr ? kind->attention : none;
}

// The attention of the layers of that kind.
template <AttentionKind Kind>
const Attention& attention_like(const Plan& p) {
    static const Attention none;
    const LayerKind* kind = first_kind(p, [](const LayerKind& k) { return k.attention.kind == Kind; });
    return kind != nullptr ? kind->attention : none;
}

const Attention& indexer_of(const Plan& p) {
    static const Attention none;
    const LayerKind* kind = first_kind(p, [](const LayerKind& k) { return k.attention.indexer_top_k > 0; });
    return kind != nullptr ? kind->attention : none;
}

const Moe& experts_of(const Plan& p) {
    static const Moe none;
    const LayerKind* kind = first_kind(p, has_experts);
    return kind != nullptr ? *kind->moe : none;
}

// The MLP of the experts, that of dense layers where there are none.
const LayerKind& mlp_of(const Plan& p) {
    static const LayerKind none;
    const LayerKind* kind = first_kind(p, has_experts);
    if (kind == nullptr) kind = first_kind(p, [](const LayerKind& k) { return k.dense(); });
    return kind != nullptr ? *kind : none;
}

double dense_layers(const Plan& p) {
    return static_cast<double>(std::count_if(p.model->layers.begin(), p.model->layers.end(), [&p](int kind) {
        return p.model->kinds[static_cast<std::size_t>(kind)].dense();
    }));
}

const char* activation(const Plan& p) {
    switch (mlp_of(p).activation) {
    case model::Activation::silu:
        return "silu";
    case model::Activation::gelu:
        return "gelu";
    case model::Activation::quick_gelu:
        return "quick_gelu";
    case model::Activation::relu2:
        return "relu2";
    case model::Activation::gelu_tanh:
        return "gelu_tanh";
    }
    return "silu";
}

const char* router_score(const Plan& p) {
    switch (experts_of(p).router.scoring) {
    case model::Scoring::softmax:
        return "softmax";
    case model::Scoring::sigmoid:
        return "sigmoid";
    case model::Scoring::sqrt_softplus:
        return "sqrtsoftplus";
    }
    return "softmax";
}

double ffn(const Plan& p) {
    const LayerKind* kind = first_kind(p, [](const LayerKind& k) { return k.dense(); });
    return static_cast<double>(kind != nullptr ? kind->dense_ffn : experts_of(p).ffn);
}

double window(const Plan& p) {
    const LayerKind* kind = first_kind(p, [](const LayerKind& k) { return k.attention.window > 0; });
    return kind != nullptr ? static_cast<double>(kind->attention.window - 1) : 0.0;
}

double glu_limit(const Plan& p) { return mlp_of(p).swiglu_limit; }

// 1 for each layer of which `has` holds, as engines write such lists.
template <class Has>
std::string marks(const Plan& p, const Has& has) {
    std::string text = "[";
    for (std::size_t layer = 0; layer < p.model->layers.size(); ++layer)
        text += fmt::format("{}{}", layer > 0 ? "," : "", has(p.model->kind_of(static_cast<int>(layer))) ? 1 : 0);
    return text + "]";
}

bool mlp_bias(const LayerKind& k) { return k.moe ? k.moe->expert_bias : k.mlp_bias; }

// Engines have biases in all linear layers, in none, or in the projection of queries, keys and values alone.
const char* bias_form(const Plan& p) {
    const LayerKind* first = nullptr;
    for (const int index : p.model->layers) {
        const LayerKind& k = p.model->kinds[static_cast<std::size_t>(index)];
        if (!softmax_attention(k)) continue;
        if (k.attention.out_bias != mlp_bias(k)) return "mixed";
        if (k.attention.out_bias && !k.attention.qkv_bias) return "mixed";
        if (first == nullptr) first = &k;
        if (first->attention.out_bias != k.attention.out_bias || first->attention.qkv_bias != k.attention.qkv_bias)
            return "mixed";
    }
    if (first == nullptr) return "none";
    if (first->attention.out_bias) return "all";
    return first->attention.qkv_bias ? "qkv" : "none";
}

// The attention without that in which layers may differ without being of another size.
Attention without_reach(Attention attention) {
    attention.window = attention.chunk = 0;
    attention.shares_index = false;
    return attention;
}

// Layers of the same attention, one of which may leave queries and keys as they are where the other rotates them.
bool same_attention(const LayerKind& a, const LayerKind& b) {
    Attention left = without_reach(a.attention), right = without_reach(b.attention);
    if (left.rope_dim == 0 || right.rope_dim == 0) {
        left.rope_dim = right.rope_dim = 0;
        left.rope = right.rope = std::nullopt;
    }
    return left == right;
}

// True where one configuration describes every layer.
bool uniform(const Plan& p) {
    const LayerKind *attention = nullptr, *linear = nullptr, *experts = nullptr, *dense = nullptr;
    const auto agrees = [](const LayerKind*& first, const LayerKind& k, const auto& same) {
        if (first == nullptr) first = &k;
        return same(*first, k);
    };
    std::int64_t reach = 0;
    for (const int index : p.model->layers) {
        const LayerKind& k = p.model->kinds[static_cast<std::size_t>(index)];
        if (softmax_attention(k) && !agrees(attention, k, same_attention)) return false;
        const bool other = !softmax_attention(k) && k.attention.kind != AttentionKind::none;
        if (other && !agrees(linear, k, same_attention)) return false;
        if (k.moe && !agrees(experts, k, [](const LayerKind& a, const LayerKind& b) { return a.moe == b.moe; }))
            return false;
        if (k.dense() && !agrees(dense, k, [](const LayerKind& a, const LayerKind& b) {
                return a.dense_ffn == b.dense_ffn && a.mlp_bias == b.mlp_bias;
            }))
            return false;
        if (k.attention.window > 0 && reach > 0 && k.attention.window != reach) return false;
        reach = std::max(reach, k.attention.window);
        const bool has_mlp = k.moe || k.dense();
        if (has_mlp && (k.activation != mlp_of(p).activation || k.gated != mlp_of(p).gated)) return false;
    }
    return true;
}

const char* rope_scaling(const Plan& p) {
    const std::string& type = p.model->rope_scaling.type;
    if (type.empty() || p.model->rope_scaling.factor == 1.0) return "none";
    if (type == "yarn") return "yarn";
    if (type == "linear") return "linear";
    return type == "llama3" ? "llama3" : "other";
}

// Llama 3's smoothing between its published bounds, which engines have built in.
bool usual_llama3(const Plan& p) {
    const model::RopeScaling& rope = p.model->rope_scaling;
    return rope.low_freq_factor == 1.0 && rope.high_freq_factor == 4.0 && rope.original_positions == 8192;
}

const char* positions(const Plan& p) {
    if (p.model->architecture == "GPT-3") return "learned";
    return attention_of(p).rope_dim > 0 ? "rope" : "none";
}

double rotary_percent(const Plan& p) {
    const Attention& a = attention_of(p);
    const int width = a.kind == AttentionKind::gqa ? a.qk_dim : a.rope_dim;
    return width > 0 ? static_cast<double>(a.rope_dim) / width : 1.0;
}

// The weights that the chosen experts get: as the softmax over all has them, divided by their sum, or raw sigmoids.
const char* router_weights(const Plan& p) {
    const Moe& moe = experts_of(p);
    const bool softmax = moe.router.scoring == model::Scoring::softmax;
    if (softmax) return moe.router.softmax_after_top_k || moe.router.normalize ? "of chosen" : "of all";
    return moe.router.normalize || moe.top_k == 1 ? "of chosen" : "raw";
}

// A layer takes the keys of one before it unless its index is a multiple of the first number behind the second.
struct IndexSharing {
    int frequency = 0, offset = 1; // frequency 0: no such numbers
};
IndexSharing index_sharing(const Plan& p) {
    const int layers = static_cast<int>(p.model->layers.size());
    const auto fits = [&p, layers](int frequency, int offset) {
        for (int layer = 0; layer < layers; ++layer)
            if (p.model->kind_of(layer).attention.shares_index != (std::max(layer + 1 - offset, 0) % frequency != 0))
                return false;
        return true;
    };
    for (int frequency = 1; frequency <= layers; ++frequency)
        for (int offset = 1; offset <= (frequency == 1 ? 1 : layers); ++offset)
            if (fits(frequency, offset)) return {frequency, offset};
    return {};
}

char letter(const LayerKind& k) {
    if (k.attention.kind == AttentionKind::mamba) return 'M';
    if (k.attention.kind != AttentionKind::none) return '*';
    return k.moe ? 'E' : '-';
}

// The letters of a hybrid's layers, its stages apart by |, and behind a / the layers of each MTP depth.
std::string pattern(const Plan& p) {
    std::string text;
    for (const plan::Stage& stage : plan::stages(p)) {
        if (!text.empty() || !stage.embedding) text += '|';
        for (int layer = 0; layer < stage.layers; ++layer) text += letter(p.model->kind_of(stage.first_layer + layer));
    }
    for (std::size_t depth = 0; depth < p.model->mtp.size(); ++depth) text += "/*E";
    return text;
}

std::vector<PlanWord> whole_model() {
    return {
        {"model.name", TextWord{[](const Plan& p) { return p.model->name; }}},
        {"model.architecture", TextWord{[](const Plan& p) { return p.model->architecture; }}},
        {"model.layers", NumberWord{[](const Plan& p) { return double(p.model->layers.size()); }}},
        {"model.dense_layers", NumberWord{dense_layers}},
        {"model.mtp", NumberWord{[](const Plan& p) { return double(p.model->mtp.size()); }}},
        {"model.hybrid", NameWord{[](const Plan& p) { return on_off(p.model->hybrid); }}},
        {"model.hidden", NumberWord{[](const Plan& p) { return double(p.model->hidden); }}},
        {"model.vocab", NumberWord{[](const Plan& p) { return double(p.model->vocab); }}},
        {"model.vocab_divisor", NumberWord{[](const Plan& p) { return double(p.model->vocab_divisor); }}},
        {"model.tied_embeddings", NameWord{[](const Plan& p) { return on_off(p.model->tied_embeddings); }}},
        {"model.normalization", NameWord{[](const Plan& p) { return p.model->layer_norm ? "LayerNorm" : "RMSNorm"; }}},
        {"model.post_norms", NameWord{[](const Plan& p) { return on_off(p.model->post_norms); }}},
        {"model.norm_eps", NumberWord{[](const Plan& p) { return p.model->norm_eps; }}},
        {"model.uniform", NameWord{[](const Plan& p) { return on_off(uniform(p)); }}},
        {"model.bias", NameWord{bias_form}},
        {"model.parts", SetWord{model_parts, model_parts_from_string, model_parts_text}},
        {"model.pattern", TextWord{pattern}},
    };
}

std::vector<PlanWord> positions_words() {
    return {
        {"model.positions", NameWord{positions}},
        {"model.partly_rotated", NameWord{[](const Plan& p) {
             return on_off(first_kind(p, rotates) != nullptr && first_kind(p, stays) != nullptr);
         }}},
        {"model.unrotated_layers", TextWord{[](const Plan& p) { return marks(p, stays); }}},
        {"model.rope_theta", NumberWord{[](const Plan& p) { return p.model->rope_theta; }}},
        {"model.rotary_percent", NumberWord{rotary_percent}},
        {"model.rope_scaling", NameWord{rope_scaling}},
        {"model.usual_llama3", NameWord{[](const Plan& p) { return on_off(usual_llama3(p)); }}},
        {"model.rope_factor", NumberWord{[](const Plan& p) { return p.model->rope_scaling.factor; }}},
        {"model.rope_positions",
         NumberWord{[](const Plan& p) { return double(p.model->rope_scaling.original_positions); }}},
        {"model.rope_truncate", NameWord{[](const Plan& p) { return on_off(p.model->rope_scaling.truncate); }}},
        {"model.mscale", NumberWord{[](const Plan& p) { return p.model->rope_scaling.mscale; }}},
        {"model.mscale_all_dim", NumberWord{[](const Plan& p) { return p.model->rope_scaling.mscale_all_dim; }}},
        {"model.beta_fast", NumberWord{[](const Plan& p) { return p.model->rope_scaling.beta_fast; }}},
        {"model.beta_slow", NumberWord{[](const Plan& p) { return p.model->rope_scaling.beta_slow; }}},
    };
}

std::vector<PlanWord> attention_words() {
    return {
        {"model.heads", NumberWord{[](const Plan& p) { return double(attention_of(p).heads); }}},
        {"model.kv_heads", NumberWord{[](const Plan& p) { return double(attention_of(p).kv_heads); }}},
        {"model.mla", NameWord{[](const Plan& p) { return some_layer(p, latent); }}},
        {"model.sparse_attention", NameWord{[](const Plan& p) {
             return some_layer(p, [](const LayerKind& k) { return latent(k) && k.attention.indexer_top_k > 0; });
         }}},
        {"model.attention_bias", NameWord{[](const Plan& p) {
             return some_layer(p, [](const LayerKind& k) { return k.attention.qkv_bias || k.attention.out_bias; });
         }}},
        {"model.head_dim", NumberWord{[](const Plan& p) { return double(attention_of(p).qk_dim); }}},
        {"model.value_width_differs", NameWord{[](const Plan& p) {
             const Attention& a = attention_of(p);
             return on_off(a.kind == AttentionKind::gqa && a.v_dim != a.qk_dim);
         }}},
        {"model.qk_norm", NameWord{[](const Plan& p) { return on_off(attention_of(p).qk_norm); }}},
        {"model.sinks", NameWord{[](const Plan& p) { return on_off(attention_of(p).sinks); }}},
        {"model.output_gate", NameWord{[](const Plan& p) { return on_off(attention_of(p).output_gate); }}},
        {"model.window", NumberWord{window}},
        {"model.window_layers",
         TextWord{[](const Plan& p) { return marks(p, [](const LayerKind& k) { return k.attention.window > 0; }); }}},
        {"model.chunks", NameWord{[](const Plan& p) {
             return some_layer(p, [](const LayerKind& k) { return k.attention.chunk > 0; });
         }}},
        {"model.compressed", NameWord{[](const Plan& p) {
             return some_layer(p, [](const LayerKind& k) { return k.attention.kind == AttentionKind::compressed; });
         }}},
        {"model.q_lora", NumberWord{[](const Plan& p) { return double(attention_of(p).q_lora); }}},
        {"model.kv_lora", NumberWord{[](const Plan& p) { return double(attention_of(p).kv_lora); }}},
        {"model.rope_dim", NumberWord{[](const Plan& p) { return double(attention_of(p).rope_dim); }}},
        {"model.qk_nope_dim",
         NumberWord{[](const Plan& p) { return double(attention_of(p).qk_dim - attention_of(p).rope_dim); }}},
        {"model.v_dim", NumberWord{[](const Plan& p) { return double(attention_of(p).v_dim); }}},
        {"model.indexer_heads", NumberWord{[](const Plan& p) { return double(indexer_of(p).indexer_heads); }}},
        {"model.indexer_dim", NumberWord{[](const Plan& p) { return double(indexer_of(p).indexer_dim); }}},
        {"model.indexer_top_k", NumberWord{[](const Plan& p) { return double(indexer_of(p).indexer_top_k); }}},
        {"model.indexer_interleaved",
         NameWord{[](const Plan& p) { return on_off(indexer_of(p).indexer_interleaved); }}},
        {"model.index_frequency", NumberWord{[](const Plan& p) { return double(index_sharing(p).frequency); }}},
        {"model.index_offset", NumberWord{[](const Plan& p) { return double(index_sharing(p).offset); }}},
    };
}

template <AttentionKind Kind>
constexpr auto like = &attention_like<Kind>;

std::vector<PlanWord> linear_words() {
    constexpr auto delta = like<AttentionKind::gated_delta>;
    constexpr auto mamba = like<AttentionKind::mamba>;
    return {
        {"model.gated_delta", NameWord{[](const Plan& p) { return some_layer(p, gated_delta); }}},
        {"model.linear_layers", TextWord{[](const Plan& p) { return marks(p, gated_delta); }}},
        {"model.conv_kernel", NumberWord{[](const Plan& p) { return double(delta(p).conv_kernel); }}},
        {"model.key_dim", NumberWord{[](const Plan& p) { return double(delta(p).key_dim); }}},
        {"model.value_dim", NumberWord{[](const Plan& p) { return double(delta(p).value_dim); }}},
        {"model.key_heads", NumberWord{[](const Plan& p) { return double(delta(p).key_heads); }}},
        {"model.value_heads", NumberWord{[](const Plan& p) { return double(delta(p).value_heads); }}},
        {"model.mamba_heads", NumberWord{[](const Plan& p) { return double(mamba(p).value_heads); }}},
        {"model.mamba_head_dim", NumberWord{[](const Plan& p) { return double(mamba(p).value_dim); }}},
        {"model.mamba_groups", NumberWord{[](const Plan& p) { return double(mamba(p).key_heads); }}},
        {"model.mamba_state", NumberWord{[](const Plan& p) { return double(mamba(p).key_dim); }}},
    };
}

std::vector<PlanWord> mlp_words() {
    return {
        {"model.ffn", NumberWord{ffn}},
        {"model.activation", NameWord{activation}},
        {"model.gated", NameWord{[](const Plan& p) { return on_off(mlp_of(p).gated); }}},
        {"model.swiglu_limit", NumberWord{glu_limit}},
        {"model.moe_layers", TextWord{[](const Plan& p) { return marks(p, has_experts); }}},
        {"model.experts", NumberWord{[](const Plan& p) { return double(experts_of(p).experts); }}},
        {"model.shared_experts", NameWord{[](const Plan& p) {
             return some_layer(p, [](const LayerKind& k) { return k.moe && k.moe->shared_ffn > 0; });
         }}},
        {"model.expert_bias", NameWord{[](const Plan& p) {
             return some_layer(p, [](const LayerKind& k) { return k.moe && k.moe->expert_bias; });
         }}},
        {"model.probs_on_input", NameWord{[](const Plan& p) {
             return some_layer(p, [](const LayerKind& k) { return k.moe && k.moe->probs_on_input; });
         }}},
        {"model.router_score", NameWord{router_score}},
        {"model.top_k", NumberWord{[](const Plan& p) { return double(experts_of(p).top_k); }}},
        {"model.expert_ffn", NumberWord{[](const Plan& p) { return double(experts_of(p).ffn); }}},
        {"model.shared_ffn", NumberWord{[](const Plan& p) { return double(experts_of(p).shared_ffn); }}},
        {"model.shared_gate", NameWord{[](const Plan& p) { return on_off(experts_of(p).shared_gate); }}},
        {"model.latent", NumberWord{[](const Plan& p) { return double(experts_of(p).latent); }}},
        {"model.branch_norms", NameWord{[](const Plan& p) { return on_off(experts_of(p).branch_norms); }}},
        {"model.router_weights", NameWord{router_weights}},
        {"model.router_scale", NumberWord{[](const Plan& p) { return experts_of(p).router.scale; }}},
        {"model.router_groups", NumberWord{[](const Plan& p) { return double(experts_of(p).router.groups); }}},
        {"model.router_groups_kept",
         NumberWord{[](const Plan& p) { return double(experts_of(p).router.groups_kept); }}},
        {"model.selection_bias", NameWord{[](const Plan& p) { return on_off(experts_of(p).router.expert_bias); }}},
    };
}

} // namespace

std::vector<PlanWord> model_words() {
    std::vector<PlanWord> all;
    for (std::vector<PlanWord>& list :
         std::vector{whole_model(), positions_words(), attention_words(), linear_words(), mlp_words()})
        for (PlanWord& word : list) all.push_back(std::move(word));
    return all;
}

} // namespace moe::stack
