// Experts chosen behind Sinkhorn's iteration over all tokens of a call.
#include "kernels/cpu/scores.hpp"

#include <Eigen/Core>

#include <algorithm>
#include <cmath>

namespace moe::cpu {
namespace {

using In = Eigen::Map<const Eigen::ArrayXf>;
using Out = Eigen::Map<Eigen::ArrayXf>;

void sinkhorn(const SinkhornShape& s, Src logits, std::int32_t* index, void*) {
    using S = SinkhornShape;
    float* all = scratch(Slot::a, s.tokens * s.experts);
    Out d(scratch(Slot::b, s.experts), s.experts), sum(scratch(Slot::c, s.experts), s.experts);
    for (std::int64_t t = 0; t < s.tokens; ++t) {
        float* row = all + t * s.experts;
        load(logits, t * s.experts, s.experts, row);
        const float best = In(row, s.experts).maxCoeff();
        Out(row, s.experts) = (In(row, s.experts) - best).exp();
    }
    constexpr auto tiny = static_cast<float>(S::tiny);
    d.setOnes();
    double change = 2.0 * S::tolerance;
    for (int i = 0; i < S::most && change > S::tolerance; ++i) {
        sum.setZero();
        for (std::int64_t t = 0; t < s.tokens; ++t) {
            const In c(all + t * s.experts, s.experts);
            sum += 1.0f / (static_cast<float>(s.tokens) * ((d * c).sum() + tiny)) * c;
        }
        change = 0.0;
        for (int e = 0; e < s.experts; ++e) {
            const float next = 1.0f / (static_cast<float>(s.experts) * (sum[e] + tiny));
            change += std::abs(static_cast<double>(next) - static_cast<double>(d[e])) / s.experts;
            d[e] = next;
        }
    }
    float* value = scratch(Slot::d, s.top_k);
    for (std::int64_t t = 0; t < s.tokens; ++t) {
        Best best(s.top_k, index + t * s.top_k, value);
        for (int e = 0; e < s.experts; ++e) best.offer(e, d[e] * all[t * s.experts + e]);
    }
}

} // namespace

void add_sinkhorn(Kernels& table) { table.sinkhorn = sinkhorn; }

} // namespace moe::cpu
