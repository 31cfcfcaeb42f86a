// Softmax, sigmoid and sqrt-softplus scores of a row of logits.
#include "kernels/cpu/scores.hpp"

#include <Eigen/Core>

#include <cmath>

namespace moe::cpu {
namespace {

using In = Eigen::Map<const Eigen::ArrayXf>;
using Out = Eigen::Map<Eigen::ArrayXf>;

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Rows in scratch are filled up to whole vectors with copies of the first element, so that every exponential takes the
// same path: a scalar tail differs in the last bit, which would break ties between equal logits by their position.
void exponentials(const float* x, std::int64_t n, float shift, float sign, float* y) {
    std::copy_n(x, n, y);
    std::fill(y + n, y + padded(n), x[0]);
    Out out(y, padded(n));
    out = (sign * (out - shift)).exp();
}

} // namespace

void softmax(const float* x, std::int64_t n, float* y) {
    exponentials(x, n, In(x, n).maxCoeff(), 1.0f, y);
    Out(y, n) /= In(y, n).sum();
}

void scores(const RouterShape& s, const float* logits, float* score) {
    if (s.softmax_after_top_k) {
        std::copy_n(logits, s.experts, score);
        return;
    }
    switch (s.score) {
    case Score::softmax:
        softmax(logits, s.experts, score);
        return;
    case Score::sigmoid:
        exponentials(logits, s.experts, 0.0f, -1.0f, score);
        Out(score, s.experts) = 1.0f / (1.0f + In(score, s.experts));
        return;
    case Score::sqrt_softplus:
        for (int e = 0; e < s.experts; ++e) score[e] = std::sqrt(softplus(logits[e]));
        return;
    }
}

float score_slope(Score score, float logit, float value) {
    if (score == Score::sigmoid) return value * (1.0f - value);
    return value > 0.0f ? sigmoid(logit) / (2.0f * value) : 0.0f; // Where the score underflowed, its slope has, too.
}

} // namespace moe::cpu
