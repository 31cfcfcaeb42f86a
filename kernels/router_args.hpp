// Shapes of the router's ops: its choice, noise on what it reads, and what balances the load; in formulas.
#pragma once

#include <cstdint>

namespace moe {

// The best top_k of score + bias, best first, equal ones by lower index. With groups > 1 only experts of the
// groups_kept best groups are eligible, a group's score being the sum of its group_score_top best score + bias. Without
// bias and such sums (by_logit) the best logits are chosen: scores rise with them, but are equal where they round or
// saturate.
// weight = score (without bias) of the chosen, divided by (their sum + 1e-20) when normalize, times scale.
// softmax_after_top_k: the score is the logit itself, and weight = softmax over the chosen logits.
// mixer above 0, in place of all that: k by k the largest logit m is chosen of those left. Its weight is its share of
// the softmax over those left that have (m - logit) / max(|logit|, m) <= 2 mixer, times scale.
enum class Score : std::uint8_t { softmax, sigmoid, sqrt_softplus };
struct RouterShape {
    std::int64_t tokens = 0;
    int experts = 0, top_k = 0;
    Score score = Score::softmax;
    bool softmax_after_top_k = false, normalize = false;
    double scale = 1.0;
    int groups = 1, groups_kept = 1, group_score_top = 1;
    // The choice is forced where positions are given: token t of position p = positions[(first + t) / batch] goes to
    // the experts (p + k floor(experts / top_k)) mod experts.
    std::int64_t first = 0, batch = 1;
    double mixer = 0.0;
};

// Noise of kernels/deviate.hpp on the input of the router of layer `layer`: row r is of position positions[(first + r)
// / batch] in sequence noise[2] + (first + r) mod batch of the global batch; noise[0] and noise[1] are the lower and
// the upper half of a 64-bit key.
struct JitterShape {
    std::int64_t tokens = 0, cols = 0;
    std::int64_t first = 0, batch = 1;
    int layer = 0;
    double eps = 0.0; // below 1
};

// With c(t, e) = exp(logit - the token's largest logit) and d(e) = 1 at first, Sinkhorn's iteration makes
//   a(t) = 1 / (tokens (sum over e of d(e) c(t, e) + 1e-8)), d(e) = 1 / (experts (sum over t of a(t) c(t, e) + 1e-8))
// until d changes by at most 1e-4 in the mean over experts, or `most` times. Of each token the top_k largest d(e) c(t,
// e) are chosen, best first, equal ones by lower index. Source of the iteration: Megatron-LM moe_utils.py, sinkhorn(),
// which exponentiates logits as they are and goes on for ever where rounding keeps d from settling.
struct SinkhornShape {
    std::int64_t tokens = 0;
    int experts = 0, top_k = 0;
    static constexpr int most = 100;
    static constexpr double tiny = 1e-8, tolerance = 1e-4;
};

// A choice that is not the router's own, of which there is at most one: forced by positions (RouterShape::first), or
// the experts recorded[tokens, top_k] of an earlier choice, different ones for each token.
struct GivenChoice {
    const std::int32_t *positions = nullptr, *recorded = nullptr;
};

// Row t belongs to sequence t modulo `sequences`; n(b, e) tokens of sequence b hold e among their top_k largest
// logits, P(t, e) = score / (sum over e of score + 1e-20); of router bias, groups, normalize and scale play no part.
struct BalanceShape {
    RouterShape router;
    std::int64_t sequences = 1;
    double aux = 0.0, z = 0.0;
};

// The bias lies at [bias, bias + experts) of its bucket, this shard at [offset, offset + elements).
struct ExpertBiasShape {
    int experts = 0;
    std::int64_t bias = 0, offset = 0, elements = 0;
    double rate = 0.0;
};

} // namespace moe
