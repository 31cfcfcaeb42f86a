// Reading of the config.json fields that all transformer architectures have in common, and their cross-checks.
#include "planner/model/families/config.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace moe::families {
namespace {

double mscale(double factor, double weight) { return factor <= 1.0 ? 1.0 : 0.1 * weight * std::log(factor) + 1.0; }

// Defaults as in modeling_rope_utils.py of transformers 5.23.
void read_rope_scaling(const JsonObject& scaling, const JsonObject& config, model::RopeScaling& rope) {
    const std::string type = scaling.string_or("rope_type", scaling.string_or("type", "default"));
    // Text has the same position in each of mrope's three parts.
    if (type == "default" || type == "mrope") return;
    rope.type = type;
    const std::int64_t positions = config.integer_or("max_position_embeddings", 0, 0, max_window);
    rope.original_positions = scaling.integer_or("original_max_position_embeddings", positions, 0, max_window);
    // LongRoPE carries lists of factors instead of one; any value other than 1 marks the scaling as active.
    for (const char* list : {"long_factor", "short_factor", "long_mscale", "short_mscale"}) scaling.states(list);
    const bool by_length = type == "yarn" && rope.original_positions > 0 && positions > 0;
    const double fallback =
        by_length ? static_cast<double>(positions) / static_cast<double>(rope.original_positions) : 0.0;
    rope.factor = scaling.number_or("factor", fallback, 0.0, 1e6);
    rope.beta_fast = scaling.number_or("beta_fast", 32.0, 0.0, 1e6);
    rope.beta_slow = scaling.number_or("beta_slow", 1.0, 0.0, 1e6);
    rope.mscale = scaling.number_or("mscale", 0.0, 0.0, 1e6);
    rope.mscale_all_dim = scaling.number_or("mscale_all_dim", 0.0, 0.0, 1e6);
    rope.low_freq_factor = scaling.number_or("low_freq_factor", 1.0, 0.0, 1e6);
    rope.high_freq_factor = scaling.number_or("high_freq_factor", 4.0, 0.0, 1e6);
    rope.truncate = scaling.boolean_or("truncate", true);
    if (type == "proportional") {
        rope.factor = scaling.number_or("factor", 1.0, 0.0, 1e6);
        rope.share = scaling.number_or("partial_rotary_factor", 1.0, 0.0, 1.0);
    }
    if (type != "yarn") return;
    const bool both = rope.mscale > 0.0 && rope.mscale_all_dim > 0.0;
    rope.attention_factor = scaling.number_or(
        "attention_factor",
        both ? mscale(rope.factor, rope.mscale) / mscale(rope.factor, rope.mscale_all_dim) : mscale(rope.factor, 1.0),
        0.0, 1e6);
}

} // namespace

model::Rope read_rope(const JsonObject& rope, const JsonObject& config, double theta) {
    model::Rope read;
    read.theta = rope.number_or("rope_theta", theta, 1.0, 1e12);
    read_rope_scaling(rope, config, read.scaling);
    return read;
}

std::optional<model::Rope> rope_of_type(const JsonObject& json, const std::string& type, double theta) {
    if (!json.is_object("rope_parameters") || !json.object("rope_parameters").is_object(type)) return std::nullopt;
    return read_rope(json.object("rope_parameters").object(type), json, theta);
}

namespace {

std::string rope_obstacle(const model::RopeScaling& rope) {
    if (rope.type.empty()) return {};
    const bool known = rope.type == "linear" || rope.type == "yarn" || rope.type == "llama3";
    // LongRoPE has a factor for each pair of columns beside the one that is named.
    const bool by_factor = known || rope.type == "dynamic" || rope.type == "proportional";
    if (by_factor && rope.factor == 1.0 && rope.attention_factor == 1.0) return {};
    if (!known)
        return fmt::format("rope_scaling = {}: only linear, yarn and llama3 are trained yet; \"rope_scaling\": null "
                           "would run",
                           rope.type);
    if (rope.factor < 1.0) return fmt::format("rope_scaling: factor = {}: must be at least 1", rope.factor);
    if (rope.type != "linear" && rope.original_positions < 1)
        return fmt::format("rope_scaling = {}: original_max_position_embeddings is missing", rope.type);
    if (rope.type == "yarn" && (rope.beta_fast <= 0.0 || rope.beta_slow <= 0.0))
        return "rope_scaling: beta_fast and beta_slow must be above 0";
    if (rope.type == "llama3" && rope.high_freq_factor < rope.low_freq_factor)
        return fmt::format("rope_scaling: high_freq_factor = {}: must not be below low_freq_factor = {}",
                           rope.high_freq_factor, rope.low_freq_factor);
    return {};
}

int kind_index(model::Model& model, const model::LayerKind& kind) {
    const auto found = std::find(model.kinds.begin(), model.kinds.end(), kind);
    if (found != model.kinds.end()) return static_cast<int>(found - model.kinds.begin());
    model.kinds.push_back(kind);
    return static_cast<int>(model.kinds.size()) - 1;
}

void check_moe(const JsonObject& json, const model::Moe& moe) {
    const model::Router& router = moe.router;
    if (moe.top_k < 1) refuse("{}: no expert is chosen for a token: at least 1 must be", json.place());
    if (moe.top_k > moe.experts)
        json.refuse_value("num_experts_per_tok", fmt::format("must not exceed the {} experts", moe.experts));
    if (moe.experts % router.groups != 0)
        json.refuse_value("n_group", fmt::format("must divide the {} experts", moe.experts));
    if (router.groups_kept > router.groups)
        json.refuse_value("topk_group", fmt::format("must not exceed n_group = {}", router.groups));
    const int per_group = moe.experts / router.groups;
    if (router.groups > 1 && per_group < router.group_score_top)
        json.refuse_value("n_group",
                          fmt::format("leaves {} expert per group, but a group's score is the sum of its best {}",
                                      per_group, router.group_score_top));
    if (moe.top_k > router.groups_kept * per_group)
        json.refuse_value("topk_group",
                          fmt::format("keeps {} groups of {} experts, fewer than num_experts_per_tok = {}",
                                      router.groups_kept, per_group, moe.top_k));
}

void check_attention(const JsonObject& json, const model::Attention& attention) {
    if (attention.kind == model::AttentionKind::gqa && attention.heads % attention.kv_heads != 0)
        json.refuse_value("num_key_value_heads", fmt::format("must divide num_attention_heads = {}", attention.heads));
    if (attention.rope_dim % 2 != 0 || attention.rope_dim > attention.qk_dim)
        refuse("{}: {} rotary columns per head (head_dim or qk_rope_head_dim, partial_rotary_factor): must be an even "
               "number of at "
               "most {}",
               json.place(), attention.rope_dim, attention.qk_dim);
    if (attention.kind == model::AttentionKind::gated_delta && attention.value_heads % attention.key_heads != 0)
        json.refuse_value("linear_num_value_heads",
                          fmt::format("must be a multiple of linear_num_key_heads = {}", attention.key_heads));
    if (attention.sparse() && attention.indexer_dim < attention.rope_dim)
        json.refuse_value("index_head_dim",
                          fmt::format("must hold the qk_rope_head_dim = {} columns that turn", attention.rope_dim));
    if (attention.kind == model::AttentionKind::compressed && attention.heads % attention.out_groups != 0)
        refuse("{}: o_groups = {}: must divide num_attention_heads = {}", json.place(), attention.out_groups,
               attention.heads);
}

// What the kernels of layers with a state cannot hold on a GPU.
std::string state_obstacle(const model::Attention& attention) {
    constexpr std::int64_t widest = 128, most_taps = 8, widest_norm = 8192; // columns of a head, of a norm
    const auto most = [](const char* field, std::int64_t value, std::int64_t limit) {
        return value > limit ? fmt::format("{} = {}: only up to {} is trained", field, value, limit) : std::string();
    };
    if (attention.kind == model::AttentionKind::mamba) {
        if (std::string text = most("mamba_head_dim", attention.value_dim, widest); !text.empty()) return text;
        if (std::string text = most("conv_kernel", attention.conv_kernel, most_taps); !text.empty()) return text;
        return most("mamba_num_heads * mamba_head_dim / n_groups",
                    std::int64_t{attention.value_heads} * attention.value_dim / attention.key_heads, widest_norm);
    }
    if (std::string text = most("linear_key_head_dim", attention.key_dim, widest); !text.empty()) return text;
    if (std::string text = most("linear_value_head_dim", attention.value_dim, widest); !text.empty()) return text;
    return most("linear_conv_kernel_dim", attention.conv_kernel, most_taps);
}

std::string attention_obstacle(const model::Attention& attention) {
    if (attention.has_opaque()) return fmt::format("{}: only priced, not trained yet", attention.opaque.name);
    if (attention.kind == model::AttentionKind::gated_delta || attention.kind == model::AttentionKind::mamba) {
        if (std::string text = state_obstacle(attention); !text.empty()) return text;
    }
    if (attention.kind == model::AttentionKind::mla && attention.qkv_bias)
        return "attention_bias = true: biases of latent attention are not trained yet";
    if (attention.kind == model::AttentionKind::compressed)
        return "compress_ratios: no compressed sparse attention yet";
    if (attention.rope) {
        if (std::string text = rope_obstacle(attention.rope->scaling); !text.empty()) return text;
    }
    return {};
}

std::string moe_obstacle(const model::Moe& moe) {
    if (moe.router.scoring == model::Scoring::sqrt_softplus) return "scoring_func = sqrtsoftplus: not trained yet";
    return {};
}

std::string layer_obstacle(const model::LayerKind& kind) {
    if (std::string text = attention_obstacle(kind.attention); !text.empty()) return text;
    if (kind.moe) {
        if (std::string text = moe_obstacle(*kind.moe); !text.empty()) return text;
    }
    return {};
}

} // namespace

int integer(const JsonObject& json, const std::string& key, std::int64_t high) {
    return static_cast<int>(json.integer(key, 1, high));
}

int integer_or(const JsonObject& json, const std::string& key, int fallback, std::int64_t low, std::int64_t high) {
    return static_cast<int>(json.integer_or(key, fallback, low, high));
}

bool says(const JsonObject& json, const std::string& key, bool fallback) {
    return json.boolean_or(key, fallback && !json.states(key));
}

int layer_count(const JsonObject& json) { return integer(json, "num_hidden_layers", max_layers); }

std::int64_t ffn(const JsonObject& json, const std::string& key) { return json.integer(key, 1, max_ffn); }

void read_common(const JsonObject& json, model::Model& model, double eps, double theta) {
    model.hidden = json.integer("hidden_size", 1, max_hidden);
    model.vocab = json.integer("vocab_size", 2, max_vocab);
    model.tied_embeddings = json.boolean_or("tie_word_embeddings", false);
    for (const char* key : {"norm_eps", "layer_norm_eps", "rms_norm_eps"}) eps = json.number_or(key, eps, 0.0, 1.0);
    model.norm_eps = eps;
    // A base for every layer (Step-3.5) is its reader's: of the model there is none.
    model.rope_theta = json.is_array("rope_theta") ? theta : json.number_or("rope_theta", theta, 1.0, 1e12);
    if (json.has("rope_scaling")) read_rope_scaling(json.object("rope_scaling"), json, model.rope_scaling);
    if (json.is_object("rope_parameters")) { // Transformers 5 keeps base and scaling here.
        const JsonObject rope = json.object("rope_parameters");
        model.rope_theta = rope.number_or("rope_theta", model.rope_theta, 1.0, 1e12);
        read_rope_scaling(rope, json, model.rope_scaling);
    }
    if (json.is_object("megatron"))
        model.vocab_divisor = json.object("megatron").integer_or("make_vocab_size_divisible_by", 128, 1, max_vocab);
}

namespace {

// The share of a head's columns that turn; "proportional" leaves it to the frequencies.
double read_rotary_share(const JsonObject& json, const model::Model& model, std::optional<double> rotary) {
    const std::string key = "partial_rotary_factor";
    if (rotary == 0.0) return 0.0;
    const double whole = rotary.value_or(1.0);
    double share = json.number_or(key, whole, 0.0, 1.0);
    if (json.is_object("rope_parameters")) {
        const JsonObject rope = json.object("rope_parameters");
        if (model.rope_scaling.type == "proportional") return 1.0;
        share = rope.number_or(key, share, 0.0, 1.0);
    }
    if (!rotary && share != 1.0)
        refuse("{}: {} = {}: {} turns whole heads", json.place(), key, share, model.architecture);
    return share;
}

} // namespace

model::Attention read_gqa(const JsonObject& json, const model::Model& model, std::optional<double> rotary,
                          bool rounds_down) {
    model::Attention attention;
    attention.heads = integer(json, "num_attention_heads", max_heads);
    attention.kv_heads = integer_or(json, "num_key_value_heads", attention.heads, 1, max_heads);
    if (json.has("head_dim")) {
        attention.qk_dim = integer(json, "head_dim", max_dim);
    } else if (!rounds_down && model.hidden % attention.heads != 0) {
        json.refuse_value("num_attention_heads",
                          fmt::format("must divide hidden_size = {} when head_dim is not given", model.hidden));
    } else {
        attention.qk_dim = static_cast<int>(model.hidden / attention.heads);
    }
    attention.v_dim = attention.qk_dim;
    const double share = read_rotary_share(json, model, rotary);
    attention.rope_dim = static_cast<int>(std::lround(std::floor(attention.qk_dim * share)));
    return attention;
}

model::Attention read_mla(const JsonObject& json) {
    model::Attention attention;
    attention.kind = model::AttentionKind::mla;
    attention.heads = integer(json, "num_attention_heads", max_heads);
    attention.kv_heads = attention.heads;
    attention.rope_dim = integer(json, "qk_rope_head_dim", max_dim / 2);
    attention.qk_dim = integer(json, "qk_nope_head_dim", max_dim / 2) + attention.rope_dim;
    attention.v_dim = integer(json, "v_head_dim", max_dim);
    attention.q_lora = integer_or(json, "q_lora_rank", 0, 0, max_hidden);
    attention.kv_lora = integer(json, "kv_lora_rank", max_hidden);
    return attention;
}

model::Activation read_activation(const JsonObject& json, const std::string& fallback) {
    std::string name = json.string_or("hidden_act", json.string_or("hidden_activation", fallback));
    name = name.substr(0, name.find(' ')); // "quick_gelu (clamped SwiGLU variant)"
    if (name == "silu" || name == "swish") return model::Activation::silu;
    if (name == "quick_gelu") return model::Activation::quick_gelu;
    if (name == "relu2") return model::Activation::relu2;
    if (name == "gelu") return model::Activation::gelu;
    if (name == "gelu_new" || name == "gelu_pytorch_tanh" || name == "gelu_fast") return model::Activation::gelu_tanh;
    json.refuse_value(json.has("hidden_act") ? "hidden_act" : "hidden_activation",
                      "must be silu, gelu, quick_gelu or relu2");
}

std::vector<bool> layers_of_type(const JsonObject& json, const std::string& type, int layers,
                                 const std::vector<bool>& fallback) {
    if (!json.is_array("layer_types")) return fallback;
    const std::vector<std::string> types = json.strings("layer_types");
    if (types.size() != static_cast<std::size_t>(layers))
        json.refuse_value("layer_types", fmt::format("must have num_hidden_layers = {} entries", layers));
    std::vector<bool> found;
    for (const std::string& entry : types) found.push_back(entry == type);
    return found;
}

void refuse_experts(const JsonObject& json, const model::Model& model) {
    for (const char* key : {"num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"})
        if (json.integer_or(key, 0, 0, max_experts) > 1)
            json.refuse_value(key, model.architecture + " has no experts: name the architecture that has");
}

void add_layer(model::Model& model, const model::LayerKind& kind) { model.layers.push_back(kind_index(model, kind)); }
void add_mtp(model::Model& model, const model::LayerKind& kind) { model.mtp.push_back(kind_index(model, kind)); }

void repeat_last_as_mtp(const JsonObject& json, model::Model& model, const char* field) {
    const int count = integer_or(json, field, 0, 0, 64);
    const model::LayerKind last = model.kinds[static_cast<std::size_t>(model.layers.back())];
    for (int depth = 0; depth < count; ++depth) add_mtp(model, last);
}

namespace {

// Attention of other natures than the architecture's reader looks for would be priced as what it is not.
void check_natures(const JsonObject& json, const model::Model& model) {
    const auto any = [&model](model::AttentionKind nature) {
        return std::any_of(model.kinds.begin(), model.kinds.end(),
                           [nature](const model::LayerKind& kind) { return kind.attention.kind == nature; });
    };
    if (any(model::AttentionKind::compressed)) return; // The layers go by compress_ratios.
    const bool picks = std::any_of(model.kinds.begin(), model.kinds.end(),
                                   [](const model::LayerKind& kind) { return kind.attention.sparse(); });
    if (json.has("index_topk") && !picks)
        json.refuse_value("index_topk", fmt::format("attention that picks its keys is not known of {}; without the "
                                                    "field dense attention would be priced",
                                                    model.architecture));
    if (json.is_array("attn_type_list") && !any(model::AttentionKind::gated_delta) &&
        !any(model::AttentionKind::opaque))
        for (const std::int64_t type : json.integers("attn_type_list", 0, 1))
            if (type != 1) json.refuse_value("attn_type_list", "linear attention (0) is not supported");
    if (!json.is_array("layer_types")) return;
    std::vector<std::string> known{"full_attention", "sliding_attention"};
    if (any(model::AttentionKind::gated_delta) || any(model::AttentionKind::opaque))
        known.emplace_back("linear_attention");
    if (model.architecture == "GraniteMoeHybridForCausalLM")
        known = {"mamba", "linear_attention", "attention", "full_attention"};
    if (model.architecture == "MiniMaxM3ForCausalLM") known.emplace_back("minimax_m3_sparse");
    if (model.architecture.starts_with("Lfm2")) known.emplace_back("conv");
    if (picks) known = {"deepseek_sparse_attention", "indexed_attention"};
    if (picks && any(model::AttentionKind::opaque)) known.insert(known.end(), {"linear_attention", "full_attention"});
    if (model.architecture == "Llama4ForCausalLM") known.emplace_back("chunked_attention");
    for (const std::string& type : json.strings("layer_types"))
        if (std::find(known.begin(), known.end(), type) == known.end())
            refuse("{}: layer_types: \"{}\" is not known of {}; known are {}", json.place(), shown(type),
                   model.architecture, fmt::join(known, ", "));
}

} // namespace

namespace {

// The field of a dropout above 0, by any of the names that families have for one; "" where there is none.
std::string dropout(const JsonObject& json) {
    for (const std::string& key : json.keys()) {
        const bool names = key.ends_with("dropout") || key.ends_with("dropout_prob") || key.ends_with("_pdrop");
        if (names && key != "classifier_dropout" && json.number_or(key, 0.0, 0.0, 1.0) > 0.0) return key;
        if (key == "attn_config" && json.is_object(key)) // DBRX
            if (const std::string inner = dropout(json.object(key)); !inner.empty())
                return fmt::format("{}.{}", key, inner);
    }
    return {};
}

} // namespace

void check_model(const JsonObject& json, const model::Model& model) {
    check_natures(json, model);
    for (const model::LayerKind& kind : model.kinds) {
        check_attention(json, kind.attention);
        if (kind.moe) check_moe(json, *kind.moe);
    }
}

std::string obstacle(const JsonObject& json, const model::Model& model) {
    for (const model::LayerKind& kind : model.kinds) {
        if (std::string text = layer_obstacle(kind); !text.empty()) return text;
    }
    if (model.residual_streams > 1)
        return fmt::format("{} residual streams: no hyper-connections yet", model.residual_streams);
    if (const std::string key = dropout(json); !key.empty()) return key + ": must be 0";
    if (std::string text = rope_obstacle(model.rope_scaling); !text.empty()) return text;
    const bool mixes = std::any_of(model.kinds.begin(), model.kinds.end(), [](const model::LayerKind& kind) {
        return kind.moe && kind.moe->router.mixer > 0.0;
    });
    if (!mixes && json.number_or("router_jitter_noise", 0.0, 0.0, 1.0) > 0.0)
        return "router_jitter_noise: must be 0, it is noise on what experts read as well; the plan's input_jitter is "
               "on what routers read";
    return {};
}

} // namespace moe::families
