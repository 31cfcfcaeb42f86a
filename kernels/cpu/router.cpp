// The top-k router: scores, group-limited choice, weights, and their gradient to the logits.
#include "kernels/cpu/scores.hpp"

#include <Eigen/Core>

#include <algorithm>
#include <cmath>
#include <limits>

namespace moe::cpu {
namespace {

using In = Eigen::Map<const Eigen::ArrayXf>;
using Out = Eigen::Map<Eigen::ArrayXf>;

struct Work { // scratch of one row
    float *logits, *score, *choice, *value, *eligible;
    explicit Work(const RouterShape& s)
        : logits(scratch(Slot::a, s.experts)),
          score(scratch(Slot::b, padded(s.experts))),
          choice(scratch(Slot::c, s.experts)),
          value(scratch(Slot::d, padded(s.experts))),
          eligible(scratch(Slot::e, s.groups)) {}
};

float group_score(const float* choice, int experts, int top, float* value) {
    // The values alone matter here: the list is kept like Best's, without indices.
    int used = 0;
    for (int e = 0; e < experts; ++e) {
        if (used == top && !(choice[e] > value[top - 1])) continue;
        int at = used < top ? used++ : top - 1;
        for (; at > 0 && choice[e] > value[at - 1]; --at) value[at] = value[at - 1];
        value[at] = choice[e];
    }
    float sum = 0.0f;
    for (int i = 0; i < used; ++i) sum += value[i];
    return sum;
}

void mark_groups(const RouterShape& s, const Work& w, std::int32_t* kept) {
    const int size = s.experts / s.groups;
    float* group_value = w.logits; // The logits are no longer needed once the scores are known.
    std::fill_n(w.eligible, s.groups, 0.0f);
    Best best(s.groups_kept, kept, group_value);
    for (int g = 0; g < s.groups; ++g) {
        best.offer(g, group_score(w.choice + g * size, size, std::min(s.group_score_top, size), w.value));
    }
    for (int i = 0; i < s.groups_kept; ++i) w.eligible[kept[i]] = 1.0f;
}

void choose(const RouterShape& s, const Work& w, std::int32_t* kept, std::int32_t* index) {
    const bool grouped = limits_groups(s);
    const int size = s.experts / s.groups;
    if (grouped) mark_groups(s, w, kept);
    Best best(s.top_k, index, w.value);
    for (int e = 0; e < s.experts; ++e) {
        if (!grouped || w.eligible[e / size] > 0.0f) best.offer(e, w.choice[e]);
    }
}

void weigh(const RouterShape& s, const Work& w, const std::int32_t* index, float* weight) {
    for (int k = 0; k < s.top_k; ++k) weight[k] = w.score[index[k]];
    const auto scale = static_cast<float>(s.scale);
    Out chosen(weight, s.top_k);
    if (s.softmax_after_top_k) {
        softmax(weight, s.top_k, w.value);
        std::copy_n(w.value, s.top_k, weight);
    } else if (s.normalize) {
        chosen /= chosen.sum() + tiny_sum;
    }
    chosen *= scale;
}

// Experts an even distance apart, one further for every position: E positions in a row give each expert K tokens.
void force(const RouterShape& s, std::int32_t position, std::int32_t* index) {
    const int apart = s.experts / s.top_k;
    for (int k = 0; k < s.top_k; ++k) index[k] = (position + k * apart) % s.experts;
}

// The weight of expert `best` among those whose `left` is above minus infinity, and in p every one's share. `left` is
// what has not been chosen of `logits`.
float mix(const RouterShape& s, const float* logits, const float* left, int best, float* p) {
    const float most = left[best];
    float sum = 0.0f;
    for (int e = 0; e < s.experts; ++e) {
        const float far = (most - logits[e]) / std::max(std::abs(logits[e]), most);
        const bool apart = std::isinf(left[e]) || far > 2.0f * static_cast<float>(s.mixer);
        sum += p[e] = apart ? 0.0f : std::exp(left[e] - most);
    }
    for (int e = 0; e < s.experts; ++e) p[e] /= sum;
    return p[best];
}

// Expert by expert: `each(k, best, weight, p)`.
template <class Each>
void mix_all(const RouterShape& s, const Work& w, const std::int32_t* forced, const Each& each) {
    std::copy_n(w.logits, s.experts, w.choice);
    for (int k = 0; k < s.top_k; ++k) {
        int best = forced != nullptr ? forced[k] : -1;
        for (int e = 0; forced == nullptr && e < s.experts; ++e) {
            const bool taken = w.choice[e] == -std::numeric_limits<float>::infinity();
            if (!taken && (best < 0 || w.choice[e] > w.choice[best])) best = e;
        }
        best = std::max(best, 0);
        each(k, best, static_cast<float>(s.scale) * mix(s, w.logits, w.choice, best, w.value));
        w.choice[best] = -std::numeric_limits<float>::infinity();
    }
}

void router(const RouterShape& s, Src logits, Src bias, GivenChoice given, std::int32_t* index, float* weight, void*) {
    const Work w(s);
    const float* shift = bias.data != nullptr ? read(bias, 0, s.experts, scratch(Slot::f, s.experts)) : nullptr;
    std::int32_t* kept = index_scratch(s.groups);
    for (std::int64_t t = 0; t < s.tokens; ++t) {
        load(logits, t * s.experts, s.experts, w.logits);
        if (s.mixer > 0.0) {
            std::int32_t* chosen = index + t * s.top_k;
            const bool forced = given.recorded != nullptr || given.positions != nullptr;
            if (given.recorded != nullptr) {
                std::copy_n(given.recorded + t * s.top_k, s.top_k, chosen);
            } else if (given.positions != nullptr) {
                force(s, given.positions[(s.first + t) / s.batch], chosen);
            }
            mix_all(s, w, forced ? chosen : nullptr, [&](int k, int best, float share) {
                chosen[k] = best;
                weight[t * s.top_k + k] = share;
            });
            continue;
        }
        scores(s, w.logits, w.score);
        Out choice(w.choice, s.experts);
        choice = In(by_logit(s, shift != nullptr) ? w.logits : w.score, s.experts);
        if (shift != nullptr) choice += In(shift, s.experts);
        if (given.recorded != nullptr) {
            std::copy_n(given.recorded + t * s.top_k, s.top_k, index + t * s.top_k);
        } else if (given.positions != nullptr) {
            force(s, given.positions[(s.first + t) / s.batch], index + t * s.top_k);
        } else {
            choose(s, w, kept, index + t * s.top_k);
        }
        weigh(s, w, index + t * s.top_k, weight + t * s.top_k);
    }
}

// Gradient of the chosen scores: ds[k] from dweight[k].
void chosen_grad(const RouterShape& s, const float* dweight, const float* score, const std::int32_t* index, float* ds) {
    const auto scale = static_cast<float>(s.scale);
    float sum = tiny_sum, along = 0.0f;
    for (int k = 0; k < s.top_k; ++k) sum += score[index[k]];
    for (int k = 0; k < s.top_k; ++k) along += dweight[k] * score[index[k]];
    for (int k = 0; k < s.top_k; ++k) {
        ds[k] = scale * (s.normalize ? (dweight[k] - along / sum) / sum : dweight[k]);
    }
}

void softmax_after_grad(const RouterShape& s, const float* dweight, const float* logits, const std::int32_t* index,
                        float* value, float* dlogits) {
    for (int k = 0; k < s.top_k; ++k) value[k] = logits[index[k]];
    softmax(value, s.top_k, value);
    const In p(value, s.top_k), dw(dweight, s.top_k);
    const float along = (p * dw).sum();
    for (int k = 0; k < s.top_k; ++k) {
        dlogits[index[k]] += static_cast<float>(s.scale) * value[k] * (dweight[k] - along);
    }
}

void router_grad(const RouterShape& s, const float* dweight, Src logits, const std::int32_t* index, Dst dlogits,
                 void*) {
    const Work w(s);
    float* grad = scratch(Slot::f, s.experts);
    for (std::int64_t t = 0; t < s.tokens; ++t) {
        const std::int32_t* chosen = index + t * s.top_k;
        const float* dw = dweight + t * s.top_k;
        load(logits, t * s.experts, s.experts, w.logits);
        std::fill_n(grad, s.experts, 0.0f);
        if (s.mixer > 0.0) {
            mix_all(s, w, chosen, [&](int k, int best, float share) {
                const In p(w.value, s.experts);
                Out(grad, s.experts) -= dw[k] * share * p;
                grad[best] += dw[k] * share;
            });
        } else if (s.softmax_after_top_k) {
            softmax_after_grad(s, dw, w.logits, chosen, w.value, grad);
        } else {
            scores(s, w.logits, w.score);
            chosen_grad(s, dw, w.score, chosen, w.value);
            for (int k = 0; k < s.top_k; ++k) grad[chosen[k]] += w.value[k];
            Out g(grad, s.experts);
            if (s.score == Score::softmax) {
                const In p(w.score, s.experts);
                g = p * (g - (g * p).sum());
            } else {
                for (int k = 0; k < s.top_k; ++k) {
                    const int e = chosen[k];
                    grad[e] *= score_slope(s.score, w.logits[e], w.score[e]);
                }
            }
        }
        store(dlogits, t * s.experts, s.experts, grad);
    }
}

void expert_scale(const float* weight, const std::int32_t* index, Src s, float* scaled, std::int64_t n, int experts,
                  void*) {
    const float* factor = read(s, 0, experts, scratch(Slot::a, experts));
    for (std::int64_t i = 0; i < n; ++i) scaled[i] = index[i] < 0 ? 0.0f : weight[i] * factor[index[i]];
}

void expert_scale_grad(const float* dscaled, const float* weight, const std::int32_t* index, Src s, float* dweight,
                       float* ds, std::int64_t n, int experts, void*) {
    const float* factor = read(s, 0, experts, scratch(Slot::a, experts));
    for (std::int64_t i = 0; i < n; ++i) {
        const float grad = dscaled[i];
        if (index[i] >= 0) ds[index[i]] += grad * weight[i];
        dweight[i] = index[i] < 0 ? 0.0f : grad * factor[index[i]];
    }
}

} // namespace

void add_router(Kernels& table) {
    table.expert_scale = expert_scale;
    table.expert_scale_grad = expert_scale_grad;
    table.router = router;
    table.router_grad = router_grad;
}

} // namespace moe::cpu
