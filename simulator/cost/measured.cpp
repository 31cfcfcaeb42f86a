// Curves and surfaces through measured calls.
#include "simulator/cost/measured.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace moe::cost {

MeasuredFamily::MeasuredFamily(const machine::Hardware& hardware, const std::string& key,
                               const std::vector<machine::MeasuredCall>& calls)
    : calls_(calls), sides_(calls.front().sides.size()) {
    if (sides_ == 0 || sides_ > most_sides) return;
    formula_.emplace(hardware, key, calls);
    for (const machine::MeasuredCall& call : calls) {
        places_.push_back(place_of(call.work, call.sides));
        shares_.push_back(std::log(call.seconds / (*formula_)(call.work, call.sides)));
    }
}

double MeasuredFamily::seconds(double work, const std::vector<double>& sides) const {
    return has_sides(work, sides) ? on_surface(work, sides) : on_curve(work);
}

double MeasuredFamily::on_curve(double work) const {
    const machine::MeasuredCall& last = calls_.back();
    if (calls_.size() == 1 || work >= last.work)
        return last.work > 0.0 ? last.seconds * std::max(work, 0.0) / last.work : last.seconds;
    // Below the first call its fixed part rules: keep the slope of the first two.
    auto upper = std::upper_bound(calls_.begin(), calls_.end(), work,
                                  [](double w, const machine::MeasuredCall& c) { return w < c.work; });
    if (upper == calls_.begin()) ++upper;
    const machine::MeasuredCall &a = *(upper - 1), &b = *upper;
    if (work <= 0.0 || a.work <= 0.0 || a.seconds <= 0.0 || b.seconds <= 0.0 || b.work <= a.work) return a.seconds;
    const double slope = std::log(b.seconds / a.seconds) / std::log(b.work / a.work);
    return a.seconds * std::pow(work / a.work, slope);
}

MeasuredFamily::Place MeasuredFamily::place_of(double work, const std::vector<double>& sides) {
    Place x{1.0, std::log2(work)};
    for (std::size_t i = 0; i < sides.size(); ++i) x[2 + i] = std::log2(sides[i]);
    return x;
}

std::vector<double> MeasuredFamily::weights_at(const Place& at) const {
    // Octaves. Leaving single calls of an H200's calibration out, errors change by less than a twentieth of themselves
    // from 0.35 to 0.7 octaves.
    constexpr double least_reach = 0.35;
    // Calls of this very shape say more than those around it: within a twentieth of an octave a call counts as thirty.
    constexpr double same_reach = 0.05, same_weight = 30.0;
    constexpr std::size_t near = 4;
    constexpr double farthest = 9.2; // squares of the reach: what is there counts for 1e-4
    const std::size_t unknowns = sides_ + 2;
    std::vector<double> weights(places_.size()); // at first squares of distances
    for (std::size_t c = 0; c < places_.size(); ++c)
        for (std::size_t i = 1; i < unknowns; ++i) weights[c] += (places_[c][i] - at[i]) * (places_[c][i] - at[i]);
    std::array<double, near + 1> least; // of the distances, in order
    least.fill(std::numeric_limits<double>::infinity());
    for (double distance : weights)
        for (double& known : least)
            if (distance < known) std::swap(distance, known);
    const double reach = std::max(least_reach * least_reach, least[std::min(near, places_.size() - 1)]);
    for (double& weight : weights) {
        const double distance = weight;
        weight = distance > farthest * reach ? 0.0 : std::exp(-distance / reach);
        if (weight > 0.0 && distance < 50.0 * same_reach * same_reach) // beyond, it is less than rounding
            weight += same_weight * std::exp(-distance / (same_reach * same_reach));
    }
    return weights;
}

double MeasuredFamily::on_surface(double work, const std::vector<double>& sides) const {
    // The weight of a slope of zero. Leaving single calls of an H200's calibration out, errors change by less than a
    // twentieth of themselves from 0.03 to 1.
    constexpr double slope_weight = 0.3;
    const std::size_t unknowns = sides.size() + 2;
    const Place at = place_of(work, sides);
    const std::vector<double> weights = weights_at(at);
    Normal<most_unknowns> normal;
    double low = std::numeric_limits<double>::infinity(), high = -low;
    for (std::size_t c = 0; c < places_.size(); ++c) {
        if (weights[c] == 0.0) continue;
        Place x = places_[c];
        for (std::size_t i = 1; i < unknowns; ++i) x[i] -= at[i];
        normal.add(x, unknowns, shares_[c], weights[c]);
        low = std::min(low, shares_[c]);
        high = std::max(high, shares_[c]);
    }
    for (std::size_t i = 1; i < unknowns; ++i) normal.a[i][i] += slope_weight;
    normal.solve(unknowns);
    const double margin = 0.25; // beyond what was seen nearby, a slope is believed no further than this
    return (*formula_)(work, sides) * std::exp(std::clamp(normal.b[0], low - margin, high + margin));
}

double MeasuredFamily::clock_hz(double work, const std::vector<double>& sides) const {
    if (!has_sides(work, sides)) return 0.0;
    const std::vector<double> weights = weights_at(place_of(work, sides));
    double sum = 0.0, whole = 0.0;
    for (std::size_t c = 0; c < calls_.size(); ++c) {
        if (calls_[c].clock_hz <= 0.0) continue;
        sum += weights[c] * std::log(calls_[c].clock_hz);
        whole += weights[c];
    }
    return whole > 0.0 ? std::exp(sum / whole) : 0.0;
}

const MeasuredFamily* MeasuredFamilies::find(const program::CostPoint& at) const {
    const MeasuredFamily* family = find(at.key);
    for (std::size_t i = 0; family == nullptr && i < at.longer.size(); ++i) family = find(at.longer[i]);
    return family;
}

const MeasuredFamily* MeasuredFamilies::find(const std::string& key) const {
    const auto calls = hardware_.measured.find(key);
    if (calls == hardware_.measured.end() || calls->second.empty()) return nullptr;
    const std::lock_guard<std::mutex> lock(mutex_);
    std::unique_ptr<const MeasuredFamily>& family = fitted_[key];
    if (family == nullptr) family = std::make_unique<const MeasuredFamily>(hardware_, key, calls->second);
    return family.get();
}

} // namespace moe::cost
