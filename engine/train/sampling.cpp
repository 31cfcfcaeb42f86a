// Greedy choice, and draws from what temperature, top-k and top-p leave.
#include "engine/train/sampling.hpp"

#include "kernels/deviate.hpp"
#include "planner/base/error.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace moe::train {

void check_sampling(const Sampling& s) {
    if (!(s.temperature >= 0.0) || !std::isfinite(s.temperature))
        refuse("--temperature {}: must be 0 (the likeliest token) or more", s.temperature);
    if (s.top_k < 0) refuse("--top-k {}: must be 0 (all) or more", s.top_k);
    if (!(s.top_p > 0.0) || !(s.top_p <= 1.0)) refuse("--top-p {}: must be above 0 and at most 1", s.top_p);
}

std::int32_t choose_token(std::span<const float> logits, const Sampling& s, std::int64_t number) {
    if (logits.empty()) fail("there are no logits to choose from");
    const auto best = std::max_element(logits.begin(), logits.end());
    if (s.temperature <= 0.0) return static_cast<std::int32_t>(best - logits.begin());
    std::vector<std::int32_t> order(logits.size());
    std::iota(order.begin(), order.end(), 0);
    const auto likelier = [&logits](std::int32_t a, std::int32_t b) {
        const float x = logits[static_cast<std::size_t>(a)], y = logits[static_cast<std::size_t>(b)];
        return x > y || (x == y && a < b); // NOLINT: equal bits are what is meant
    };
    std::sort(order.begin(), order.end(), likelier);
    if (s.top_k > 0) order.resize(std::min(order.size(), static_cast<std::size_t>(s.top_k)));
    std::vector<double> weight;
    for (const std::int32_t id : order)
        weight.push_back(std::exp(static_cast<double>(logits[static_cast<std::size_t>(id)] - *best) / s.temperature));
    const double all = std::accumulate(weight.begin(), weight.end(), 0.0);
    double kept = 0.0;
    std::size_t count = 0;
    while (count < weight.size() && (count == 0 || kept < s.top_p * all)) kept += weight[count++];
    const std::uint64_t bits = splitmix(splitmix(s.seed) ^ splitmix(static_cast<std::uint64_t>(number)));
    double drawn = static_cast<double>(bits >> 11) * 0x1p-53 * kept;
    for (std::size_t i = 0; i + 1 < count; ++i) {
        if (drawn < weight[i]) return order[i];
        drawn -= weight[i];
    }
    return order[count - 1];
}

} // namespace moe::train
