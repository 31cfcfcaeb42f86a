// FP32 values of E4M3 and E5M2 bytes, by tables of all 256.
#include "kernels/cpu/widen_e4m3.hpp"

#include "kernels/fp8.hpp"

namespace moe::cpu {
namespace {

struct Widened { // FP32 value of every byte
    float of[256];
    explicit Widened(float (*value)(std::uint8_t)) {
        for (int x = 0; x < 256; ++x) of[x] = value(static_cast<std::uint8_t>(x));
    }
    void operator()(const std::uint8_t* x, float scale, std::int64_t n, float* y) const {
        for (std::int64_t i = 0; i < n; ++i) y[i] = of[x[i]] * scale;
    }
};

} // namespace

void widen_e4m3(const std::uint8_t* x, float scale, std::int64_t n, float* y) {
    static const Widened widened(float_of_e4m3); // not built before the processor is known to do
    widened(x, scale, n, y);
}
void widen_e5m2(const std::uint8_t* x, float scale, std::int64_t n, float* y) {
    static const Widened widened(float_of_e5m2);
    widened(x, scale, n, y);
}

} // namespace moe::cpu
