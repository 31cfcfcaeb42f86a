// Normal deviates by counter: initial weights.
#include "kernels/deviate.hpp"

#include "kernels/cpu/rows.hpp"
#include "kernels/kernels.hpp"

#include <bit>
#include <cmath>

namespace moe::cpu {

namespace {

// The deviate of 64 random bits.
double deviate(std::uint64_t bits) {
    constexpr Series logs = log_terms, cosines = cosine_terms, sines = sine_terms;
    const std::uint64_t upper = (bits >> 32) + 1; // upper is exactly u * 2^32.
    std::uint64_t number = std::bit_cast<std::uint64_t>(static_cast<double>(upper));
    auto exponent = static_cast<std::int32_t>(number >> 52) - 1023 - 32;
    double m = std::bit_cast<double>((number & 0xfffffffffffffu) | 0x3ff0000000000000u); // The number lies in [1, 2).
    if (m >= root_of_two) m *= 0.5, ++exponent;
    const double f = (m - 1.0) / (m + 1.0), squared = f * f;
    double series = logs.term[0];
    for (int i = 1; i < 9; ++i) series = std::fma(series, squared, logs.term[i]);
    const double logarithm = std::fma(2.0 * f, series, exponent * log_of_two);

    const auto lower = static_cast<std::uint32_t>(bits);
    const std::uint32_t quarter = (lower >> 30) + (lower >> 29 & 1);      // quarter turn that is nearest
    const auto rest = static_cast<std::int32_t>(lower - (quarter << 30)); // angle from there, in 2^-32 of a turn
    const double x = rest * (two_pi * 0x1p-32), x2 = x * x;
    double cosine = cosines.term[0], sine = sines.term[0];
    for (int i = 1; i < 9; ++i) {
        cosine = std::fma(cosine, x2, cosines.term[i]);
        sine = std::fma(sine, x2, sines.term[i]);
    }
    sine *= x;
    const double turned[] = {cosine, -sine, -cosine, sine};
    return std::sqrt(-2.0 * logarithm) * turned[quarter & 3];
}

void draw_normal(std::uint64_t key, std::int64_t first, double scale, float* y, std::int64_t n, void*) {
    for (std::int64_t i = 0; i < n; ++i)
        y[i] = static_cast<float>(scale * deviate(splitmix(key ^ splitmix(static_cast<std::uint64_t>(first + i)))));
}

} // namespace

void add_deviate(Kernels& table) { table.draw_normal = draw_normal; }

} // namespace moe::cpu
