// Layers of a plan's model that facts are read from: the first that has what is asked for stands for all of them.
#pragma once

#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"

namespace moe::stack {

inline const char* on_off(bool on) { return on ? "on" : "off"; }

// The kind of the first layer, in order, of which `has` holds; nullptr where there is none.
template <class Has>
const model::LayerKind* first_kind(const plan::Plan& p, const Has& has) {
    for (const int kind : p.model->layers)
        if (const model::LayerKind& k = p.model->kinds[static_cast<std::size_t>(kind)]; has(k)) return &k;
    return nullptr;
}

template <class Has>
const char* some_layer(const plan::Plan& p, const Has& has) {
    return on_off(first_kind(p, has) != nullptr);
}

inline bool has_experts(const model::LayerKind& k) { return k.moe.has_value(); }
inline bool latent(const model::LayerKind& k) {
    return k.attention.kind == model::AttentionKind::mla || k.attention.kind == model::AttentionKind::compressed;
}
inline bool softmax_attention(const model::LayerKind& k) {
    return k.attention.kind == model::AttentionKind::gqa || latent(k);
}
inline bool gated_delta(const model::LayerKind& k) { return k.attention.kind == model::AttentionKind::gated_delta; }

} // namespace moe::stack
