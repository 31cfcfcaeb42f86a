// FP32 values of E4M3 bytes, by a table of all 256.
#include "kernels/cpu/widen_e4m3.hpp"

#include "kernels/fp8.hpp"

namespace moe::cpu {
namespace {

struct Widened { // FP32 value of every byte
    float of[256];
    Widened() {
        for (int x = 0; x < 256; ++x) of[x] = float_of_e4m3(static_cast<std::uint8_t>(x));
    }
};

} // namespace

void widen_e4m3(const std::uint8_t* x, float scale, std::int64_t n, float* y) {
    static const Widened widened; // not built before the processor is known to do
    for (std::int64_t i = 0; i < n; ++i) y[i] = widened.of[x[i]] * scale;
}

} // namespace moe::cpu
