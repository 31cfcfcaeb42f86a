// Describes layers, positions and machines in words.
#include "planner/base/counted.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/plan_fields.hpp"
#include "tools/report/show_json.hpp"

#include <fmt/format.h>

namespace moe::tools {

namespace {

void join(std::string& text, const std::string& more) { text += (text.empty() ? "" : ", ") + more; }

std::string softmax_text(const model::Attention& a) {
    std::string text = a.heads == a.kv_heads ? fmt::format("{} of {}", counted(a.heads, "head"), a.qk_dim)
                                             : fmt::format("{} query and {} of {}", a.heads,
                                                           counted(a.kv_heads, "key/value head"), a.qk_dim);
    if (a.v_dim != a.qk_dim) join(text, fmt::format("values of {}", a.v_dim));
    if (a.q_lora > 0) join(text, fmt::format("query latent {}", a.q_lora));
    return text;
}

std::string latent_text(const model::Attention& a) {
    std::string text = fmt::format("latent (MLA): {} of {}, values of {}", counted(a.heads, "head"), a.qk_dim, a.v_dim);
    join(text, a.q_lora > 0 ? fmt::format("query latent {}", a.q_lora) : "queries projected directly");
    join(text, fmt::format("key/value latent {}", a.kv_lora));
    return text;
}

std::string compressed_text(const model::Attention& a) {
    std::string text = fmt::format("compressed keys: {} of {}", counted(a.heads, "head"), a.qk_dim);
    join(text, a.compress_ratio > 0 ? fmt::format("{} positions in one", a.compress_ratio) : "window only");
    return text;
}

void add_details(std::string& text, const model::Attention& a) {
    if (a.rope_dim == 0)
        join(text, "none rotated");
    else if (a.rope_dim != a.qk_dim)
        join(text, fmt::format("{} rotated", a.rope_dim));
    if (a.window > 0) join(text, fmt::format("window of {}", a.window));
    if (a.chunk > 0) join(text, fmt::format("chunks of {}", a.chunk));
    if (a.indexer_top_k > 0) {
        join(text, counted(a.indexer_top_k, "key") + " picked by an indexer");
        if (a.shares_index) text += " of an earlier layer";
        if (a.indexes()) text += " of " + counted(a.indexer_heads, "head");
    }
    if (a.qk_norm) join(text, "norms of queries and keys");
    if (a.qkv_bias) join(text, "bias of queries, keys and values");
    if (a.out_bias) join(text, "bias of the output");
    if (a.sinks) join(text, "sinks");
    if (a.output_gate) join(text, "output gate");
    if (a.head_gate) join(text, "gate per head");
    if (a.k_eq_v) join(text, "keys serve as values");
}

std::string router_text(const model::Router& r) {
    std::string text = r.scoring == model::Scoring::softmax   ? "softmax"
                       : r.scoring == model::Scoring::sigmoid ? "sigmoid"
                                                              : "sqrt-softplus";
    text += r.softmax_after_top_k ? " router over those chosen" : " router";
    if (r.groups > 1) join(text, fmt::format("{} of {}", r.groups_kept, counted(r.groups, "group")));
    if (r.expert_bias) join(text, "selection bias");
    if (r.scale != 1.0) join(text, fmt::format("weights times {}", r.scale));
    return text;
}

const char* activation_text(const model::LayerKind& kind) {
    switch (kind.activation) {
    case model::Activation::silu:
        return kind.gated ? "SwiGLU" : "SiLU";
    case model::Activation::gelu:
        return kind.gated ? "GeGLU" : "GELU";
    case model::Activation::quick_gelu:
        return kind.gated ? "gated quick GELU" : "quick GELU";
    case model::Activation::relu2:
        return kind.gated ? "gated squared ReLU" : "squared ReLU";
    case model::Activation::gelu_tanh:
        return kind.gated ? "GeGLU (tanh)" : "GELU (tanh)";
    }
    return "";
}

} // namespace

std::string attention_text(const model::Attention& a) {
    std::string text;
    switch (a.kind) {
    case model::AttentionKind::gqa:
        text = softmax_text(a);
        break;
    case model::AttentionKind::mla:
        text = latent_text(a);
        break;
    case model::AttentionKind::compressed:
        text = compressed_text(a);
        break;
    case model::AttentionKind::gated_delta:
        return fmt::format("gated delta net: {} of {}, {} of {}, convolution of {}", counted(a.key_heads, "key head"),
                           a.key_dim, counted(a.value_heads, "value head"), a.value_dim, a.conv_kernel);
    case model::AttentionKind::mamba:
        return fmt::format("Mamba-2: {} of {}, state {}, {}, convolution of {}", counted(a.value_heads, "head"),
                           a.value_dim, a.key_dim, counted(a.key_heads, "group"), a.conv_kernel);
    case model::AttentionKind::opaque:
        return fmt::format("{}: {} weights", a.opaque.name, a.opaque.weights);
    case model::AttentionKind::none:
        return "-";
    }
    add_details(text, a);
    if (a.has_opaque()) join(text, fmt::format("beside {} of {} weights", a.opaque.name, a.opaque.weights));
    return text;
}

std::string mlp_text(const model::LayerKind& kind) {
    if (!kind.moe)
        return kind.dense_ffn > 0 ? fmt::format("dense of {}, {}", kind.dense_ffn, activation_text(kind)) : "-";
    const model::Moe& m = *kind.moe;
    std::string text = fmt::format("{} of {}, {} per token", counted(m.experts, "expert"), m.ffn, m.top_k);
    if (m.shared_ffn > 0) join(text, fmt::format("shared of {}{}", m.shared_ffn, m.shared_gate ? " with a gate" : ""));
    if (m.latent > 0) join(text, fmt::format("in a latent width of {}", m.latent));
    join(text, router_text(m.router));
    if (m.expert_bias) join(text, "biases");
    join(text, activation_text(kind));
    return text;
}

std::string rope_text(const model::Model& model) {
    std::string text =
        fmt::format("rotary, base {:g}{}", model.rope_theta, model.rope_interleaved ? ", adjacent pairs" : ", halves");
    const model::RopeScaling& s = model.rope_scaling;
    if (!s.type.empty()) {
        join(text, fmt::format("{} times {:g}", s.type, s.factor));
        if (s.original_positions > 0) text += fmt::format(" of {} positions", s.original_positions);
    }
    return text;
}

std::string layers_text(const std::vector<int>& layers) {
    std::vector<std::string> runs;
    for (std::size_t at = 0; at < layers.size();) {
        std::size_t end = at;
        while (end + 1 < layers.size() && layers[end + 1] == layers[end] + 1) ++end;
        runs.push_back(end == at ? fmt::format("{}", layers[at]) : fmt::format("{}-{}", layers[at], layers[end]));
        at = end + 1;
    }
    constexpr std::size_t most = 4;
    if (runs.size() > most) return fmt::format("{}, {} .. {}", runs[0], runs[1], runs.back());
    return fmt::format("{}", fmt::join(runs, ", "));
}

std::vector<int> layers_of(const model::Model& model, int kind) {
    std::vector<int> layers;
    for (std::size_t i = 0; i < model.layers.size(); ++i)
        if (model.layers[i] == kind) layers.push_back(static_cast<int>(i));
    return layers;
}

int mtp_layers_of(const model::Model& model, int kind) {
    int count = 0;
    for (const int of : model.mtp) count += of == kind ? 1 : 0;
    return count;
}

std::vector<std::string> why_not(const model::Model& model) {
    if (model.not_executable.empty()) return {};
    return {model.not_executable};
}

PlanFacts facts_of(const plan::Plan& plan) {
    PlanFacts facts;
    facts.fault = stack::check_stack(plan, stack::load_stack(plan.stack, *plan.hardware)).message;
    if (const plan::PlanFault fault = stack::check_stack(plan, stack::load_stack("moe-plan", *plan.hardware)))
        facts.why_not.push_back(fault.message);
    for (const std::string& field : plan::field_names())
        if (plan::field_text(plan, field) != plan::field_text(plan::Plan{}, field)) facts.changed.push_back(field);
    return facts;
}

} // namespace moe::tools
