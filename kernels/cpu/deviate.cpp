// Random numbers by counter: normal deviates of initial weights, and uniform noise on the inputs of routers.
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

void jitter(const JitterShape& s, Src x, const std::int32_t* positions, const std::int32_t* noise, Dst y, void*) {
    const std::uint64_t key =
        static_cast<std::uint32_t>(noise[0]) | static_cast<std::uint64_t>(static_cast<std::uint32_t>(noise[1])) << 32;
    const std::uint64_t layer = splitmix(key ^ splitmix(static_cast<std::uint64_t>(s.layer)));
    constexpr int levels = 1 << noise_bits;
    const auto step = static_cast<float>(s.eps / levels);
    float* row = scratch(Slot::a, s.cols);
    for (std::int64_t t = 0; t < s.tokens; ++t) {
        const std::int64_t at = s.first + t;
        const auto sequence = static_cast<std::uint64_t>(noise[2] + at % s.batch);
        const auto position = static_cast<std::uint32_t>(positions[at / s.batch]);
        std::uint64_t counter = splitmix(layer ^ splitmix(sequence << 32 | position)), bits = 0;
        load(x, t * s.cols, s.cols, row);
        for (std::int64_t c = 0; c < s.cols; ++c) {
            if (c % noise_columns == 0) bits = splitmix(counter), counter += splitmix_step;
            const auto n = static_cast<int>(bits >> noise_bits * (c % noise_columns) & (levels - 1));
            row[c] *= std::fma(static_cast<float>(2 * n - (levels - 1)), step, 1.0f);
        }
        store(y, t * s.cols, s.cols, row);
    }
}

} // namespace

void add_deviate(Kernels& table) {
    table.draw_normal = draw_normal;
    table.jitter = jitter;
}

} // namespace moe::cpu
