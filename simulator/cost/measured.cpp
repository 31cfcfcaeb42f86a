// Seconds of an op from measured calls of its family: a curve over work, or a surface over work and sides.
#include "simulator/cost/cost.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace moe {

namespace {

double on_curve(const std::vector<MeasuredCall>& calls, double work) {
    const MeasuredCall& last = calls.back();
    if (calls.size() == 1 || work >= last.work)
        return last.work > 0.0 ? last.seconds * std::max(work, 0.0) / last.work : last.seconds;
    // Below the first call its fixed part rules: keep the slope of the first two.
    auto upper =
        std::upper_bound(calls.begin(), calls.end(), work, [](double w, const MeasuredCall& c) { return w < c.work; });
    if (upper == calls.begin()) ++upper;
    const MeasuredCall &a = *(upper - 1), &b = *upper;
    if (work <= 0.0 || a.work <= 0.0 || a.seconds <= 0.0 || b.seconds <= 0.0 || b.work <= a.work) return a.seconds;
    const double slope = std::log(b.seconds / a.seconds) / std::log(b.work / a.work);
    return a.seconds * std::pow(work / a.work, slope);
}

constexpr std::size_t most_sides = 6, most_unknowns = most_sides + 2; // a constant, work and sides

// Symmetric positive definite system of the first n rows by Cholesky; only the lower triangle is read.
struct Normal {
    std::array<std::array<double, most_unknowns>, most_unknowns> a{};
    std::array<double, most_unknowns> b{};

    void add(const std::array<double, most_unknowns>& x, std::size_t n, double y, double weight) {
        for (std::size_t i = 0; i < n; ++i) {
            b[i] += weight * x[i] * y;
            for (std::size_t j = 0; j <= i; ++j) a[i][j] += weight * x[i] * x[j];
        }
    }
    double constant(std::size_t n) { // the first unknown
        for (std::size_t i = 0; i < n; ++i) {
            for (std::size_t j = 0; j <= i; ++j) {
                double sum = a[i][j];
                for (std::size_t k = 0; k < j; ++k) sum -= a[i][k] * a[j][k];
                a[i][j] = i == j ? std::sqrt(std::max(sum, 1e-12)) : sum / a[j][j];
            }
            for (std::size_t k = 0; k < i; ++k) b[i] -= a[i][k] * b[k];
            b[i] /= a[i][i];
        }
        for (std::size_t i = n; i-- > 0;) {
            for (std::size_t k = i + 1; k < n; ++k) b[i] -= a[k][i] * b[k];
            b[i] /= a[i][i];
        }
        return b[0];
    }
};

using Place = std::array<double, most_unknowns>; // [1, log2 work, log2 sides..]

Place place_of(double work, const std::vector<double>& sides) {
    Place x{1.0, std::log2(work)};
    for (std::size_t i = 0; i < sides.size(); ++i) x[2 + i] = std::log2(sides[i]);
    return x;
}

double on_surface(const std::vector<MeasuredCall>& calls, double work, const std::vector<double>& sides) {
    // Octaves, and the weight of a slope of zero. Leaving single calls of an H200's calibration out, errors change by
    // less than a tenth of themselves from 0.35 to 1.5 octaves and from 0.01 to 0.1.
    constexpr double least_reach = 0.35, slope_weight = 0.03;
    constexpr std::size_t near = 4;
    const std::size_t unknowns = sides.size() + 2;
    const Place at = place_of(work, sides);
    std::vector<double> distances(calls.size());
    for (std::size_t c = 0; c < calls.size(); ++c) {
        const Place x = place_of(calls[c].work, calls[c].sides);
        for (std::size_t i = 1; i < unknowns; ++i) distances[c] += (x[i] - at[i]) * (x[i] - at[i]);
    }
    std::vector<double> sorted = distances;
    const auto nth = sorted.begin() + static_cast<std::ptrdiff_t>(std::min(near, sorted.size() - 1));
    std::nth_element(sorted.begin(), nth, sorted.end());
    const double reach = std::max(least_reach * least_reach, *nth);
    Normal normal;
    double low = std::numeric_limits<double>::infinity(), high = -low;
    for (std::size_t c = 0; c < calls.size(); ++c) {
        const double weight = std::exp(-distances[c] / reach);
        if (weight < 1e-4) continue;
        Place x = place_of(calls[c].work, calls[c].sides);
        for (std::size_t i = 1; i < unknowns; ++i) x[i] -= at[i];
        const double y = std::log(calls[c].seconds / calls[c].work);
        normal.add(x, unknowns, y, weight);
        low = std::min(low, y);
        high = std::max(high, y);
    }
    for (std::size_t i = 1; i < unknowns; ++i) normal.a[i][i] += slope_weight;
    const double margin = 0.25; // beyond what was seen nearby, a slope is believed no further than this
    return work * std::exp(std::clamp(normal.constant(unknowns), low - margin, high + margin));
}

} // namespace

double measured_seconds(const std::vector<MeasuredCall>& calls, double work, const std::vector<double>& sides) {
    if (calls.empty()) return -1.0;
    const std::size_t known = calls.front().sides.size();
    if (known == 0 || known != sides.size() || known > most_sides || !(work > 0.0)) return on_curve(calls, work);
    return on_surface(calls, work, sides);
}

} // namespace moe
