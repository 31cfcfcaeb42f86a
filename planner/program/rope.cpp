// The frequencies of a rotary embedding, as a model's rope_scaling bends them.
#include "planner/model/model.hpp"
#include "planner/program/program.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

namespace moe::program {

namespace {

// Column pair that turns `rotations` times over the original context.
double correction(double rotations, int dim, double theta, double positions) {
    return dim * std::log(positions / (rotations * 2.0 * std::numbers::pi)) / (2.0 * std::log(theta));
}

FrequencyScale yarn(const model::RopeScaling& r, int dim, double theta) {
    const auto positions = static_cast<double>(r.original_positions);
    double first = correction(r.beta_fast, dim, theta, positions),
           last = correction(r.beta_slow, dim, theta, positions);
    if (r.truncate) {
        first = std::floor(first);
        last = std::ceil(last);
    }
    first = std::max(first, 0.0);
    last = std::min(last, dim - 1.0);
    if (first == last) last += 0.001;
    // Pairs before `first` keep their frequency, those after `last` are interpolated.
    return {r.factor, last, first, 0.0, r.attention_factor};
}

} // namespace

FrequencyScale frequency_scale(const model::Rope& rope, int rotary_dim) {
    const model::RopeScaling& r = rope.scaling;
    if (r.type ==
        "proportional") { // Pairs behind the first so many have no frequency: the bounds lie between two pairs.
        const double turned = std::floor(r.share * rotary_dim / 2.0);
        return {std::numeric_limits<double>::infinity(), turned, turned - 1.0, 0.0, 1.0};
    }
    if ((r.factor == 1.0 && r.attention_factor == 1.0) || rotary_dim == 0) return {};
    if (r.type == "yarn" && r.original_positions > 0) return yarn(r, rotary_dim, rope.theta);
    if (r.type == "llama3" && r.original_positions > 0)
        // Where both bounds are one (Llama 4 Scout), a pair is either kept or not.
        return {r.factor, r.low_freq_factor, std::max(r.high_freq_factor, r.low_freq_factor * (1.0 + 1e-9)),
                static_cast<double>(r.original_positions) / (2.0 * std::numbers::pi), 1.0};
    if (r.type == "linear") return {r.factor, 1e9, 2e9, 0.0, 1.0}; // The bounds lie beyond every pair: none is kept.
    return {};
}

} // namespace moe::program
