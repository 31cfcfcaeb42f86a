// Scores of experts from logits, shared by the router and its balancing losses.
#pragma once

#include "kernels/cpu/rows.hpp"

namespace moe::cpu {

// Keeps normalised weights finite when every score underflows.
inline constexpr float tiny_sum = 1e-20f;

inline bool limits_groups(const RouterShape& s) { return s.groups > 1 && s.groups_kept < s.groups; }
// True where only the order of scores counts, which is that of the logits.
inline bool by_logit(const RouterShape& s, bool biased) {
    return !biased && (!limits_groups(s) || s.group_score_top == 1 || s.groups == s.experts);
}

// Rows of scores have room for whole vectors.
inline std::int64_t padded(std::int64_t n) { return (n + 15) / 16 * 16; }

// y[n] = softmax(x); y has room for padded(n).
void softmax(const float* x, std::int64_t n, float* y);

// The row's scores before any choice; score has room for padded(experts).
void scores(const RouterShape& s, const float* logits, float* score);

// Slope of sigmoid and sqrt(softplus) at a logit whose score is known.
float score_slope(Score score, float logit, float value);

// The best k of the candidates offered, best first. A later candidate goes behind an equal earlier one, so ties fall to
// the lower index; every slot is filled by the first k offers, whatever their values, NaN included.
class Best {
public:
    Best(int k, std::int32_t* index, float* value) : k_(k), index_(index), value_(value) {}
    void offer(std::int32_t index, float value) {
        if (used_ == k_ && !(value > value_[k_ - 1])) return;
        int at = used_ < k_ ? used_++ : k_ - 1;
        for (; at > 0 && value > value_[at - 1]; --at) {
            index_[at] = index_[at - 1];
            value_[at] = value_[at - 1];
        }
        index_[at] = index;
        value_[at] = value;
    }

private:
    int k_, used_ = 0;
    std::int32_t* index_;
    float* value_;
};

} // namespace moe::cpu
