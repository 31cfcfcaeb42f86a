// Normal deviates by counter: initial weights, drawn where they lie.
#include "kernels/deviate.hpp"

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/families.hpp"

namespace moe::cuda {

namespace {

__device__ std::uint64_t mixed(std::uint64_t x) {
    x += splitmix_step;
    x = (x ^ (x >> 30)) * splitmix_first;
    x = (x ^ (x >> 27)) * splitmix_second;
    return x ^ (x >> 31);
}

// The deviate of 64 random bits.
__device__ double deviate(std::uint64_t bits) {
    constexpr Series logs = log_terms, cosines = cosine_terms, sines = sine_terms;
    const std::uint64_t upper = (bits >> 32) + 1; // upper is exactly u * 2^32.
    std::uint64_t number = __double_as_longlong(static_cast<double>(upper));
    auto exponent = static_cast<std::int32_t>(number >> 52) - 1023 - 32;
    double m = __longlong_as_double((number & 0xfffffffffffffu) | 0x3ff0000000000000u); // The number lies in [1, 2).
    if (m >= root_of_two) m *= 0.5, ++exponent;
    const double f = (m - 1.0) / (m + 1.0), squared = f * f;
    double series = logs.term[0];
#pragma unroll
    for (int i = 1; i < 9; ++i) series = __fma_rn(series, squared, logs.term[i]);
    const double logarithm = __fma_rn(2.0 * f, series, exponent * log_of_two);

    const auto lower = static_cast<std::uint32_t>(bits);
    const std::uint32_t quarter = (lower >> 30) + (lower >> 29 & 1);      // quarter turn that is nearest
    const auto rest = static_cast<std::int32_t>(lower - (quarter << 30)); // angle from there, in 2^-32 of a turn
    const double x = rest * (two_pi * 0x1p-32), x2 = x * x;
    double cosine = cosines.term[0], sine = sines.term[0];
#pragma unroll
    for (int i = 1; i < 9; ++i) {
        cosine = __fma_rn(cosine, x2, cosines.term[i]);
        sine = __fma_rn(sine, x2, sines.term[i]);
    }
    sine *= x;
    const double turned[] = {cosine, -sine, -cosine, sine};
    return __dsqrt_rn(-2.0 * logarithm) * turned[quarter & 3];
}

constexpr int threads = 256, each = 4;

__global__ void __launch_bounds__(threads)
    draw_kernel(std::uint64_t key, std::int64_t first, double scale, float* y, std::int64_t n) {
    std::int64_t i = std::int64_t{blockIdx.x} * threads * each + threadIdx.x;
#pragma unroll
    for (int j = 0; j < each; ++j, i += threads)
        if (i < n)
            y[i] = static_cast<float>(scale * deviate(mixed(key ^ mixed(static_cast<std::uint64_t>(first + i)))));
}

void draw_normal(std::uint64_t key, std::int64_t first, double scale, float* y, std::int64_t n, void* stream) {
    if (n <= 0) return;
    draw_kernel<<<blocks_for(n, threads * each), threads, 0, stream_of(stream)>>>(key, first, scale, y, n);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_deviate(Kernels& table) { table.draw_normal = draw_normal; }

} // namespace moe::cuda
