// Balancing of experts: loads by score, the router's auxiliary and z-losses, the selection bias, and dropped copies.
#include "kernels/cpu/scores.hpp"

#include <Eigen/Core>

#include <bit>
#include <cmath>

namespace moe::cpu {
namespace {

using In = Eigen::Map<const Eigen::ArrayXf>;
using Out = Eigen::Map<Eigen::ArrayXf>;

void router_load(const BalanceShape& s, Src logits, float* load, void*) {
    const RouterShape& r = s.router;
    std::fill_n(load, s.sequences * r.experts, 0.0f);
    float* row = scratch(Slot::a, r.experts);
    float* value = scratch(Slot::d, r.top_k);
    std::int32_t* index = index_scratch(r.top_k);
    for (std::int64_t t = 0; t < r.tokens; ++t) {
        cpu::load(logits, t * r.experts, r.experts, row);
        Best best(r.top_k, index, value);
        for (int e = 0; e < r.experts; ++e) best.offer(e, row[e]);
        float* of = load + t % s.sequences * r.experts;
        for (int k = 0; k < r.top_k; ++k) of[index[k]] += 1.0f;
    }
}

double log_sum_exp(const float* x, int n) {
    const double best = static_cast<double>(In(x, n).maxCoeff());
    double sum = 0.0;
    for (int e = 0; e < n; ++e) sum += std::exp(static_cast<double>(x[e]) - best);
    return best + std::log(sum);
}

void router_loss(const BalanceShape& s, Src logits, const float* load, float* loss, void*) {
    const RouterShape& r = s.router;
    float* row = scratch(Slot::a, r.experts);
    float* score = scratch(Slot::b, padded(r.experts));
    double aux = 0.0, z = 0.0;
    for (std::int64_t t = 0; t < r.tokens; ++t) {
        cpu::load(logits, t * r.experts, r.experts, row);
        if (s.z > 0.0) z += std::pow(log_sum_exp(row, r.experts), 2.0);
        if (load == nullptr) continue;
        scores(r, row, score);
        const In p(score, r.experts);
        const In n(load + t % s.sequences * r.experts, r.experts);
        aux += static_cast<double>((p * n).sum() / (p.sum() + tiny_sum));
    }
    loss[0] += static_cast<float>(s.aux * aux);
    loss[1] += static_cast<float>(s.z * z);
}

// Adds the gradient of sum over e of n(e) P(e) to out, P = score / sum of scores.
void add_aux_grad(const RouterShape& r, const float* logits, const float* score, const float* n, float factor,
                  float* out) {
    const In p(score, r.experts);
    const float sum = p.sum() + tiny_sum, along = (p * In(n, r.experts)).sum() / sum;
    for (int e = 0; e < r.experts; ++e) {
        const float through = factor * (n[e] - along) / sum;
        out[e] += through * (r.score == Score::softmax ? score[e] : score_slope(r.score, logits[e], score[e]));
    }
}

void router_loss_grad(const BalanceShape& s, Src logits, const float* load, Src dlogits, Dst out, void*) {
    const RouterShape& r = s.router;
    float* row = scratch(Slot::a, r.experts);
    float* score = scratch(Slot::b, padded(r.experts));
    float* grad = scratch(Slot::c, r.experts);
    for (std::int64_t t = 0; t < r.tokens; ++t) {
        cpu::load(logits, t * r.experts, r.experts, row);
        cpu::load(dlogits, t * r.experts, r.experts, grad);
        if (s.z > 0.0) {
            const auto lse = static_cast<float>(log_sum_exp(row, r.experts));
            Out(grad, r.experts) += static_cast<float>(2.0 * s.z) * lse * (In(row, r.experts) - lse).exp();
        }
        if (load != nullptr) {
            scores(r, row, score);
            add_aux_grad(r, row, score, load + t % s.sequences * r.experts, static_cast<float>(s.aux), grad);
        }
        store(out, t * r.experts, r.experts, grad);
    }
}

void add_counts(const std::int32_t* counts, float* sum, int n, void*) {
    for (int i = 0; i < n; ++i) sum[i] += static_cast<float>(counts[i]);
}

void expert_bias(const ExpertBiasShape& s, const float* load, const float* overflow, const float* squares,
                 const float* hyper, float* master, Dst w, void*) {
    if (overflow != nullptr && *overflow > 0.0f) return;
    if (hyper[8] > 0.0f && !(*squares <= hyper[8])) return;
    const float mean = In(load, s.experts).sum() / static_cast<float>(s.experts);
    for (int e = 0; e < s.experts; ++e) {
        const std::int64_t at = s.bias + e - s.offset;
        if (at < 0 || at >= s.elements || load[e] == mean) continue;
        master[at] += static_cast<float>(load[e] < mean ? s.rate : -s.rate);
        put(w, at, master[at]);
    }
}

// Whether copy j of an expert comes before its copy i, of another token of the same sequence.
bool precedes(const DropShape& s, const float* weight, const std::int32_t* positions, std::int64_t j, std::int64_t i) {
    const auto rank = [&](std::int64_t copy) {
        return (std::bit_cast<std::uint32_t>(weight[copy]) + (1u << (22 - drop_bits))) >> (23 - drop_bits);
    };
    if (s.by_weight && rank(j) != rank(i)) return rank(j) > rank(i);
    const std::int64_t group = s.sequences * s.top_k; // copies at one position
    return positions == nullptr ? j < i : positions[j / group] < positions[i / group];
}

void drop_copies(const DropShape& s, const std::int32_t* index, const float* weight, const std::int32_t* positions,
                 std::int32_t* kept, float* kept_weight, void*) {
    const std::int64_t rivals = s.rivals * s.top_k, own = s.first * s.top_k;
    const auto sequence = [&](std::int64_t i) { return i / s.top_k % s.sequences; };
    std::int32_t* load = index_scratch(s.sequences * s.experts);
    std::fill_n(load, s.sequences * s.experts, 0);
    for (std::int64_t i = 0; i < rivals; ++i) ++load[sequence(i) * s.experts + index[i]];
    for (std::int64_t to = 0; to < s.tokens * s.top_k; ++to) {
        const std::int64_t i = own + to;
        std::int64_t ahead = 0;
        // Only the experts that overflow need the order of their copies.
        const bool overflows = load[sequence(i) * s.experts + index[i]] > s.capacity;
        for (std::int64_t j = 0; overflows && j < rivals && ahead < s.capacity; ++j)
            if (index[j] == index[i] && j != i && sequence(j) == sequence(i))
                ahead += precedes(s, weight, positions, j, i) ? 1 : 0;
        kept[to] = ahead < s.capacity ? index[i] : -1;
        kept_weight[to] = ahead < s.capacity ? weight[i] : 0.0f;
    }
}

void local_experts(const std::int32_t* index, std::int32_t* to, std::int64_t n, int first, int local, void*) {
    for (std::int64_t i = 0; i < n; ++i) to[i] = index[i] >= first && index[i] < first + local ? index[i] - first : -1;
}

} // namespace

void add_balance(Kernels& table) {
    table.router_load = router_load;
    table.router_loss = router_loss;
    table.router_loss_grad = router_loss_grad;
    table.add_counts = add_counts;
    table.expert_bias = expert_bias;
    table.drop_copies = drop_copies;
    table.local_experts = local_experts;
}

} // namespace moe::cpu
