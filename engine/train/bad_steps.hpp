// Which steps are bad: their gradients' norm is not finite, or far above that of the steps before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace moe::train {

// The norms of the last steps that were taken, from which the next step's limit follows. The limit is there before the
// step begins, so that no rank waits for the host.
class BadSteps {
public:
    static constexpr std::size_t window = 32; // steps of which the median is taken
    static constexpr std::size_t fewest = 8;  // before so many are known, only norms that are not finite are bad

    BadSteps() = default;
    // norms: at most `window`, the oldest first; skipped: bad steps so far.
    BadSteps(std::vector<float> norms, std::int64_t skipped) : norms_(std::move(norms)), skipped_(skipped) {}

    // Largest square of the norm with which the next step is taken: what hyper[8] of adamw is. spike: as in
    // TrainOptions.
    float limit(double spike) const;
    // Takes note of a step with that squared norm and limit (0: every step is taken); true where it was bad.
    bool add(float squares, float limit);

    const std::vector<float>& norms() const { return norms_; }
    std::int64_t skipped() const { return skipped_; }

private:
    std::vector<float> norms_; // the oldest first
    std::int64_t skipped_ = 0;
};

} // namespace moe::train
