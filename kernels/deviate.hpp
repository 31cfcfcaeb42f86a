// The parts that normal deviates and uniform noise are made of, so that every back end draws the same bits.
#pragma once

#include <cstdint>

namespace moe {

// splitmix64 (Steele et al., OOPSLA 2014): random bits number `index` of stream `key` are splitmix(key ^
// splitmix(index)).
inline constexpr std::uint64_t splitmix_step = 0x9e3779b97f4a7c15u, splitmix_first = 0xbf58476d1ce4e5b9u,
                               splitmix_second = 0x94d049bb133111ebu;
constexpr std::uint64_t splitmix(std::uint64_t x) {
    x += splitmix_step;
    x = (x ^ (x >> 30)) * splitmix_first;
    x = (x ^ (x >> 27)) * splitmix_second;
    return x ^ (x >> 31);
}

// Box-Muller: sqrt(-2 ln u) cos(2 pi v) with u = (upper 32 bits + 1) / 2^32 and v = lower 32 bits / 2^32. Libraries
// round logarithms and cosines as they like; these are sums of IEEE operations, each product that is added to something
// an fma, in the order written in cpu/deviate.cpp and cuda/deviate.cu. ln(m 2^e), m in [1/sqrt 2, sqrt 2): e ln 2 + 2 f
// (1 + f^2/3 + f^4/5 + ..) with f = (m - 1)/(m + 1); below 1e-15.
struct Series {
    double term[9]; // coefficients, the highest power first
};
inline constexpr Series log_terms{{1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9, 1.0 / 7, 1.0 / 5, 1.0 / 3, 1.0}};
inline constexpr double log_of_two = 0.693147180559945309417, root_of_two = 1.41421356237309504880,
                        two_pi = 6.28318530717958647692;
// Series of v less the nearest quarter, |x| <= pi/4: Taylor series of cosine and sine in x^2, below 1e-15.
inline constexpr Series cosine_terms{{1.0 / 20922789888000.0, -1.0 / 87178291200.0, 1.0 / 479001600.0, -1.0 / 3628800.0,
                                      1.0 / 40320.0, -1.0 / 720.0, 1.0 / 24.0, -1.0 / 2.0, 1.0}};
inline constexpr Series sine_terms{{1.0 / 355687428096000.0, -1.0 / 1307674368000.0, 1.0 / 6227020800.0,
                                    -1.0 / 39916800.0, 1.0 / 362880.0, -1.0 / 5040.0, 1.0 / 120.0, -1.0 / 6.0, 1.0}};

// Uniform noise in (1 - eps, 1 + eps) by counter. With key and layer of JitterShape, the row of position p in sequence
// s has the random sequence that splitmix64 makes from
//   row = splitmix(splitmix(key ^ splitmix(layer)) ^ splitmix(2^32 s + p)):
// four columns share each of its numbers, splitmix(row + floor(c / 4) splitmix_step), and column c takes the 16 bits n
// from bit 16 (c mod 4) up. Its noise is fma(2 n - 65535, FP32(eps / 65536), 1), whose mean over n is 1.
inline constexpr int noise_columns = 4, noise_bits = 16;

} // namespace moe
