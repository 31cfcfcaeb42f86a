// Which rows of which weights QK-clip scales, and what it is refused for.
#include "engine/train/qk_clip.hpp"

#include "engine/ops/backend.hpp"
#include "planner/base/error.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"

#include <algorithm>
#include <cmath>
#include <span>

namespace moe::train {

namespace {

// Calls visit(layer, attention) for each layer that has a softmax over logits of queries and keys.
template <class Visit>
void for_each_attention(const model::Model& model, Visit visit) {
    std::vector<int> kinds = model.layers;
    kinds.insert(kinds.end(), model.mtp.begin(), model.mtp.end());
    for (std::size_t layer = 0; layer < kinds.size(); ++layer) {
        const model::Attention& a = model.kinds[static_cast<std::size_t>(kinds[layer])].attention;
        if (a.kind == model::AttentionKind::gqa || a.kind == model::AttentionKind::mla) visit(layer, a);
    }
}

// The weights that make a layer's queries and its keys, by name. Biases of latent attention lie before its latents.
struct Projections {
    std::vector<std::string> queries, keys;
};
Projections projections(std::size_t layer, const model::Attention& a) {
    const std::string at = fmt::format("model.layers.{}.self_attn.", layer);
    if (a.kind == model::AttentionKind::mla)
        return {{at + (a.q_lora > 0 ? "q_b_proj.weight" : "q_proj.weight")}, {at + "kv_b_proj.weight"}};
    Projections of{{at + "q_proj.weight"}, {at + "k_proj.weight"}};
    if (a.qkv_bias) of.queries.push_back(at + "q_proj.bias"), of.keys.push_back(at + "k_proj.bias");
    return of;
}

void set(std::vector<float>& factors, std::int64_t first, std::int64_t rows, double factor) {
    std::fill_n(factors.begin() + first, rows, static_cast<float>(factor));
}

// Of the heads that share keys, the largest logit: [key head].
std::vector<float> largest_of_keys(const model::Attention& a, std::span<const float> largest) {
    if (a.kind == model::AttentionKind::mla) return {largest.begin(), largest.end()};
    const int share = a.heads / a.kv_heads;
    std::vector<float> keys;
    for (int key = 0; key < a.kv_heads; ++key)
        keys.push_back(
            *std::max_element(largest.begin() + std::ptrdiff_t{key} * share, largest.begin() + (key + 1) * share));
    return keys;
}

} // namespace

void check_range(const QkClip& clip) {
    if (!std::isfinite(clip.threshold) || clip.threshold < 0.0)
        refuse("--qk-clip {}: must be above 0, or 0 (off)", clip.threshold);
    if (!(clip.alpha >= 0.0 && clip.alpha <= 1.0)) refuse("--qk-clip-alpha {}: must be between 0 and 1", clip.alpha);
}

void check_qk_clip(const QkClip& clip, const plan::Plan& plan, const WeightRules& rules, const ops::Backend& backend) {
    if (!clip.on()) return;
    if (!backend.tells_logits)
        refuse("--qk-clip {}: attention of the {} back end does not tell its largest logits, --backend cpu does",
               clip.threshold, backend.name);
    if (plan.lora.on())
        refuse("--qk-clip {}: scales weights of queries and keys, which lora = {} freezes", clip.threshold,
               plan::to_string(plan.lora));
    bool any = false;
    for_each_attention(*plan.model, [&](std::size_t layer, const model::Attention& a) {
        any = true;
        if (a.sparse() && !backend.tells_picked_logits)
            refuse("--qk-clip {}: layer {} of {} attends to keys that an indexer picks, of which the {} back end does "
                   "not tell the largest logits, --backend cpu does",
                   clip.threshold, layer, plan.model->name, backend.name);
        const auto useless = [&](const char* what) {
            refuse("--qk-clip {}: layer {} of {} {} its queries and keys, so that smaller weights do not make its "
                   "logits smaller",
                   clip.threshold, layer, plan.model->name, what);
        };
        if (a.qk_norm || a.whole_qk_norm) useless("normalizes");
        if (a.clip > 0.0) useless("cuts");
        const Projections of = projections(layer, a);
        for (const std::vector<std::string>* names : {&of.queries, &of.keys})
            for (const std::string& name : *names)
                if (rules.of(name).frozen)
                    refuse("--qk-clip {}: scales {}, which --freeze {} keeps", clip.threshold, name,
                           fmt::join(rules.freeze, " "));
    });
    if (!any)
        refuse("--qk-clip {}: {} has no attention with logits of queries and keys", clip.threshold, plan.model->name);
}

Clipping clipping(const QkClip& clip, const model::Model& model, const std::vector<std::vector<float>>& largest) {
    Clipping result;
    for_each_attention(model, [&](std::size_t layer, const model::Attention& a) {
        const auto heads = static_cast<std::size_t>(a.heads);
        if (layer >= largest.size() || largest[layer].size() < heads) return;
        const bool latent = a.kind == model::AttentionKind::mla;
        const std::vector<float> keys = largest_of_keys(a, std::span(largest[layer]).first(heads));
        const int share = a.heads / static_cast<int>(keys.size());
        // Rows of a head's queries and of a key head, and of those the ones that do not turn or all.
        const std::int64_t nope = latent ? a.qk_dim - a.rope_dim : a.qk_dim, key_rows = latent ? nope + a.v_dim : nope;
        std::vector<float> of_queries(static_cast<std::size_t>(a.heads * a.qk_dim), 1.0f),
            of_keys(keys.size() * static_cast<std::size_t>(key_rows), 1.0f);
        const int before = result.heads;
        for (std::size_t key = 0; key < keys.size(); ++key) {
            const double most = keys[key];
            if (!std::isfinite(most) || !(most > clip.threshold)) continue;
            const double eta = clip.threshold / most;
            const auto first = static_cast<std::int64_t>(key);
            for (std::int64_t head = first * share; head < (first + 1) * share; ++head) {
                set(of_queries, head * a.qk_dim, nope, std::pow(eta, clip.alpha));
                set(of_queries, head * a.qk_dim + nope, a.qk_dim - nope, eta);
            }
            set(of_keys, first * key_rows, nope, std::pow(eta, 1.0 - clip.alpha));
            result.heads += share;
        }
        if (result.heads == before) return;
        const Projections of = projections(layer, a);
        for (const std::string& name : of.queries) result.factors[name] = of_queries;
        for (const std::string& name : of.keys) result.factors[name] = of_keys;
    });
    return result;
}

} // namespace moe::train
