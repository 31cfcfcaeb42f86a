// Medians and median absolute deviations, which a few slow iterations do not move.
#include "tools/measured/settled.hpp"

#include <algorithm>
#include <cmath>

namespace moe::tools {

namespace {

// A normal distribution's standard deviation over its median absolute deviation.
constexpr double per_deviation = 1.4826;

double median_of(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return quantile(values, 0.5);
}

double deviation_of(std::vector<double> values, double median) {
    for (double& value : values) value = std::abs(value - median);
    return per_deviation * median_of(std::move(values));
}

} // namespace

double quantile(const std::vector<double>& sorted, double share) {
    const double place = share * static_cast<double>(sorted.size() - 1);
    const auto below = static_cast<std::size_t>(place);
    const std::size_t above = std::min(below + 1, sorted.size() - 1);
    return sorted[below] + (place - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

Settled settle(const std::vector<double>& seconds) {
    Settled result;
    const std::size_t half = seconds.size() / 2;
    const std::vector<double> late(seconds.begin() + static_cast<std::ptrdiff_t>(half), seconds.end());
    const double reference = median_of(late), deviation = deviation_of(late, reference);
    const auto apart = [&](std::size_t i) { return std::abs(seconds[i] - reference); };
    if (seconds.size() > 1) result.warm_up = 1;
    while (result.warm_up < half && apart(result.warm_up) > std::max(0.05 * reference, 3.0 * deviation))
        ++result.warm_up;
    for (std::size_t i = result.warm_up; i < seconds.size(); ++i)
        (apart(i) > std::max(0.10 * reference, 5.0 * deviation) ? result.outliers : result.used).push_back(i);
    if (4 * result.outliers.size() > seconds.size() - result.warm_up) {
        result.outliers.clear();
        result.used.clear();
        for (std::size_t i = result.warm_up; i < seconds.size(); ++i) result.used.push_back(i);
    }
    std::vector<double> kept;
    for (const std::size_t i : result.used) kept.push_back(seconds[i]);
    std::sort(kept.begin(), kept.end());
    result.median = quantile(kept, 0.5);
    result.low = quantile(kept, 0.1);
    result.high = quantile(kept, 0.9);
    return result;
}

} // namespace moe::tools
