// A step's clock without its stamps: every interval between two stamps of stream 0 loses one stamp.
#include "engine/stamps.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace moe {

StampClock::StampClock(std::vector<double> ends, double plain) : ends_(std::move(ends)) {
    if (ends_.empty()) return;
    if (plain > 0.0) stamp_ = std::max(0.0, (ends_.back() - plain) / static_cast<double>(ends_.size()));
    // Ops shorter than a stamp keep some time, so that the others have to lose more: as much as makes the sum right.
    for (int round = 0; round < 8; ++round) {
        double before = 0.0, sum = 0.0, longer = 0.0;
        without_.clear();
        for (const double end : ends_) {
            const double seconds = end - before, kept = std::max(seconds - stamp_, 0.1 * seconds);
            longer += seconds - stamp_ > 0.1 * seconds;
            without_.push_back(sum += kept);
            before = end;
        }
        const double missing = sum - plain;
        if (stamp_ <= 0.0 || longer == 0.0 || missing < 1e-6 * plain) return;
        stamp_ += missing / longer;
    }
}

double StampClock::without(double time) const {
    const auto next = std::upper_bound(ends_.begin(), ends_.end(), time);
    const auto passed = static_cast<std::size_t>(next - ends_.begin());
    const double end = passed == 0 ? 0.0 : ends_[passed - 1], at = passed == 0 ? 0.0 : without_[passed - 1];
    if (next == ends_.end()) return at + (time - end);
    return at + std::min(time - end, without_[passed] - at);
}

double StampClock::removed_seconds() const { return ends_.empty() ? 0.0 : ends_.back() - without_.back(); }

} // namespace moe
