// Figures of any size compared by their ratio.
#pragma once

#include <doctest/doctest.h>

// doctest::Approx adds 1 to the larger of both figures before it multiplies by epsilon, so that the microseconds of two
// kernels are equal whatever they are. Zero is nearly zero alone.
inline doctest::Approx nearly(double value) { return doctest::Approx(value).scale(value == 0.0 ? 1e-300 : 0.0); }
