// QK-clip: query and key weights of attention heads whose logits have grown too large, scaled down behind a step.
#pragma once

#include "engine/train/weight_rules.hpp"
#include "planner/model/fwd.hpp"
#include "planner/plan/fwd.hpp"

#include <map>
#include <string>
#include <vector>

namespace moe::ops {
struct Backend;
}

namespace moe::train {

// Behind a step, a head whose largest logit m was above the threshold has eta = threshold / m (Kimi K2, arXiv
// 2507.20534, section 2.1): its queries are scaled by eta^alpha and its keys by eta^(1 - alpha). Heads that share keys
// have one m, the largest of them, as in Megatron-Core. In latent attention the parts of a head that do not turn are
// scaled so; the turning part of its queries by eta, as all heads share the turning key.
struct QkClip {
    double threshold = 0.0; // largest logit that stays, softmax' scale included; 0 = off
    double alpha = 0.5;     // share of the queries
    bool on() const { return threshold > 0.0; }
};

// Throws Error (bad_input) for values outside their range, by the name of the command-line option.
void check_range(const QkClip& clip);
// Throws Error (bad_input) where it is on and cannot be: a back end that does not tell logits, adapters, frozen
// weights, attention whose logits do not follow its weights' scale, or none at all.
void check_qk_clip(const QkClip& clip, const plan::Plan& plan, const WeightRules& rules, const ops::Backend& backend);

// What QK-clip does behind a step.
struct Clipping {
    std::map<std::string, std::vector<float>> factors; // by weight: of each row, 1 for those that stay
    int heads = 0;                                     // query heads whose weights are scaled
};
// largest: [layer][query head], layers of MTP behind the model's; a layer may have more places than heads, and none
// without logits. Heads whose largest is not finite stay.
Clipping clipping(const QkClip& clip, const model::Model& model, const std::vector<std::vector<float>>& largest);

} // namespace moe::train
