// Entries of a history in order of both steps and falling magnitudes: the first that still counts is the largest.
#include "engine/train/scale_history.hpp"

#include <algorithm>
#include <cmath>

namespace moe::train {

void ScaleHistory::add(const std::string& tensor, std::int64_t step, float largest) {
    if (!(largest > 0.0f) || !std::isfinite(largest)) return;
    std::vector<weights::Largest>& kept = entries_[tensor];
    while (!kept.empty() && kept.back().value <= largest) kept.pop_back();
    if (!kept.empty() && kept.back().step == step) return;
    kept.push_back({step, largest});
    const auto counts = [&](const weights::Largest& entry) { return entry.step > step - length; };
    kept.erase(kept.begin(), std::find_if(kept.begin(), kept.end(), counts));
}

float ScaleHistory::window(const std::string& tensor, std::int64_t step) const {
    const auto found = entries_.find(tensor);
    if (found == entries_.end()) return 0.0f;
    for (const weights::Largest& entry : found->second)
        if (entry.step >= step - length && entry.step < step) return entry.value;
    return 0.0f;
}

} // namespace moe::train
