// The median of the last norms, and the limit that follows from it.
#include "engine/train/bad_steps.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace moe::train {

float BadSteps::limit(double spike) const {
    constexpr float largest = std::numeric_limits<float>::max();
    if (spike <= 0.0 || norms_.size() < fewest) return largest;
    std::vector<float> sorted = norms_;
    const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
    std::nth_element(sorted.begin(), middle, sorted.end());
    const double most = spike * static_cast<double>(*middle);
    const double square = most * most;
    if (square > static_cast<double>(largest)) return largest;
    return std::max(static_cast<float>(square), std::numeric_limits<float>::min()); // 0 would mean any
}

bool BadSteps::add(float squares, float limit) {
    if (limit > 0.0f && !(squares <= limit)) {
        ++skipped_;
        return true;
    }
    norms_.push_back(std::sqrt(squares));
    if (norms_.size() > window) norms_.erase(norms_.begin());
    return false;
}

} // namespace moe::train
