// One row for each part, with the layers or models that have it.
#include "planner/stack/model_parts.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "planner/stack/layer_facts.hpp"

#include <algorithm>
#include <iterator>
#include <vector>

namespace moe::stack {
namespace {

using model::Attention;
using model::LayerKind;
using plan::Plan;

// Tells whether the query, key or value heads of a layer are treated in this way.
template <class Has>
bool heads(const Plan& p, const Has& has) {
    return first_kind(p, [&has](const LayerKind& k) { return softmax_attention(k) && has(k.attention); }) != nullptr;
}

template <class Has>
bool experts(const Plan& p, const Has& has) {
    return first_kind(p, [&has](const LayerKind& k) { return k.moe && has(*k.moe); }) != nullptr;
}

// Layers that rotate do so by more than one base or scaling.
bool several_rotations(const Plan& p) {
    const Attention* first = nullptr;
    for (const int index : p.model->layers) {
        const LayerKind& k = p.model->kinds[static_cast<std::size_t>(index)];
        if (!softmax_attention(k) || k.attention.rope_dim == 0) continue;
        if (first == nullptr) first = &k.attention;
        if (p.model->rope_of(k.attention) != p.model->rope_of(*first)) return true;
    }
    return false;
}

struct Part {
    const char* name;
    bool (*has)(const Plan&);
};

constexpr Part parts[] = {
    {"whole_qk_norm", [](const Plan& p) { return heads(p, [](const Attention& a) { return a.whole_qk_norm; }); }},
    {"plain_qk_norm", [](const Plan& p) { return heads(p, [](const Attention& a) { return a.plain_qk_norm; }); }},
    {"norm_behind", [](const Plan& p) { return heads(p, [](const Attention& a) { return a.norm_behind; }); }},
    {"value_norm", [](const Plan& p) { return heads(p, [](const Attention& a) { return a.value_norm; }); }},
    {"head_gate", [](const Plan& p) { return heads(p, [](const Attention& a) { return a.head_gate; }); }},
    {"softplus_gate", [](const Plan& p) { return heads(p, [](const Attention& a) { return a.softplus_gate; }); }},
    {"k_eq_v", [](const Plan& p) { return heads(p, [](const Attention& a) { return a.k_eq_v; }); }},
    {"clip", [](const Plan& p) { return heads(p, [](const Attention& a) { return a.clip > 0.0; }); }},
    {"attention_scale", [](const Plan& p) { return heads(p, [](const Attention& a) { return a.scale > 0.0; }); }},
    {"value_scale", [](const Plan& p) { return heads(p, [](const Attention& a) { return a.value_scale != 1.0; }); }},
    {"query_scale",
     [](const Plan& p) { return heads(p, [](const Attention& a) { return a.query_scale.beta != 0.0; }); }},
    {"several_rotations", several_rotations},
    {"opaque",
     [](const Plan& p) {
         return first_kind(p, [](const LayerKind& k) { return k.attention.has_opaque(); }) != nullptr;
     }},
    {"parallel", [](const Plan& p) { return first_kind(p, [](const LayerKind& k) { return k.parallel; }) != nullptr; }},
    {"query_latent",
     [](const Plan& p) {
         return first_kind(p, [](const LayerKind& k) {
                    return k.attention.kind == model::AttentionKind::gqa && k.attention.q_lora > 0;
                }) != nullptr;
     }},
    {"group_experts", [](const Plan& p) { return experts(p, [](const model::Moe& m) { return m.group_ffn > 0; }); }},
    {"layer_norm_without_bias", [](const Plan& p) { return p.model->layer_norm && !p.model->layer_norm_bias; }},
    {"embedding_scale", [](const Plan& p) { return p.model->embedding_scale != 1.0; }},
    {"residual_scale", [](const Plan& p) { return p.model->residual_scale != 1.0; }},
    {"logit_scale", [](const Plan& p) { return p.model->logit_scale != 1.0; }},
    {"logit_cap", [](const Plan& p) { return p.model->logit_cap > 0.0; }},
    {"head_bias", [](const Plan& p) { return p.model->head_bias; }},
    {"output_scale",
     [](const Plan& p) { return first_kind(p, [](const LayerKind& k) { return k.output_scale; }) != nullptr; }},
    {"limit_behind",
     [](const Plan& p) { return first_kind(p, [](const LayerKind& k) { return k.limit_behind; }) != nullptr; }},
    {"mixer", [](const Plan& p) { return experts(p, [](const model::Moe& m) { return m.router.mixer > 0.0; }); }},
};
static_assert(std::size(parts) <= 32);

std::vector<std::string> part_names() {
    std::vector<std::string> names;
    for (const Part& part : parts) names.emplace_back(part.name);
    return names;
}

} // namespace

unsigned model_parts(const Plan& plan) {
    unsigned found = 0;
    for (std::size_t i = 0; i < std::size(parts); ++i)
        if (parts[i].has(plan)) found |= 1U << i;
    return found;
}

std::string model_parts_text(unsigned found) {
    std::string text;
    for (std::size_t i = 0; i < std::size(parts); ++i)
        if ((found >> i & 1U) != 0) text += fmt::format("{}{}", text.empty() ? "" : "+", parts[i].name);
    return text.empty() ? "none" : text;
}

unsigned model_parts_from_string(const std::string& text) {
    if (text == "none") return 0;
    const std::vector<std::string> names = part_names();
    unsigned found = 0;
    for (std::size_t begin = 0; begin <= text.size();) {
        const std::size_t end = std::min(text.find('+', begin), text.size());
        const std::string name = text.substr(begin, end - begin);
        const auto known = std::find(names.begin(), names.end(), name);
        if (known == names.end()) refuse("unknown part of a model '{}'{}", shown(name), did_you_mean(name, names));
        found |= 1U << (known - names.begin());
        begin = end + 1;
    }
    return found;
}

} // namespace moe::stack
