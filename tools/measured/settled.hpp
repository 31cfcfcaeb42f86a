// Which iterations of a run say how fast it is: warm-up and outliers are told apart from the rest.
#pragma once

#include <cstddef>
#include <vector>

namespace moe::tools {

// The reference is the median of the second half. Warm-up is the first iteration and those after it, within the first
// half, that differ from the reference by more than 5 % and by more than 3 robust deviations. Behind it an outlier
// differs by more than 10 % and by more than 5 robust deviations: evaluation, a checkpoint, a stalled file system.
// Where more than a quarter would be outliers the times scatter as a whole, and none is one.
struct Settled {
    std::size_t warm_up = 0;           // number of iterations at the front
    std::vector<std::size_t> used;     // numbers of the iterations used, ascending
    std::vector<std::size_t> outliers; // numbers of the outliers, ascending
    double median = 0.0;               // seconds of `used`
    double low = 0.0, high = 0.0;      // 10 % and 90 % quantiles of `used`, seconds
};
// seconds: time of each iteration, positive, in order; at least one.
Settled settle(const std::vector<double>& seconds);

// Quantile `share` of sorted values, linear between them.
double quantile(const std::vector<double>& sorted, double share);

} // namespace moe::tools
