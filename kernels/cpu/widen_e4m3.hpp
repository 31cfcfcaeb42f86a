// E4M3 and E5M2 values of one scale as FP32.
#pragma once

#include <cstdint>

namespace moe::cpu {

// y[i] = scale x[i] for n values. Under the sanitizers it is compiled without them, as add_product() is.
void widen_e4m3(const std::uint8_t* x, float scale, std::int64_t n, float* y);
void widen_e5m2(const std::uint8_t* x, float scale, std::int64_t n, float* y);

} // namespace moe::cpu
