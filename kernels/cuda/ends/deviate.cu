// Random numbers by counter: normal deviates of initial weights, and uniform noise on the inputs of routers.
#include "kernels/deviate.hpp"

#include "kernels/cuda/families.hpp"
#include "kernels/cuda/noise.cuh"
#include "kernels/cuda/vector.cuh"

namespace moe::cuda {

namespace {

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

constexpr int rows_of_block = threads / 32, in_flight = 4;

// A warp takes a row, whose key each lane works out once; several packs of a lane are on their way at a time.
template <class A>
__global__ void __launch_bounds__(threads)
    jitter_kernel(JitterShape s, float step, Src x, const std::int32_t* positions, const std::int32_t* noise, Dst y) {
    constexpr int W = A::width;
    constexpr int levels = 1 << noise_bits;
    const std::int64_t row = std::int64_t{blockIdx.x} * rows_of_block + threadIdx.x / 32;
    if (row >= s.tokens) return;
    const std::int64_t at = s.first + row;
    const std::uint64_t layer = mixed(step_key(noise) ^ mixed(static_cast<std::uint64_t>(s.layer)));
    const auto sequence = static_cast<std::uint64_t>(noise[2] + at % s.batch);
    const auto position = static_cast<std::uint32_t>(positions[at / s.batch]);
    const std::uint64_t counter = mixed(layer ^ mixed(sequence << 32 | position));
    for (std::int64_t first = threadIdx.x % 32 * W; first < s.cols; first += 32 * W * in_flight) {
        typename A::Held held[in_flight];
#pragma unroll
        for (int j = 0; j < in_flight; ++j)
            if (first + j * 32 * W < s.cols) held[j] = A::take(x, row * s.cols + first + j * 32 * W);
#pragma unroll
        for (int j = 0; j < in_flight; ++j) {
            const std::int64_t col = first + j * 32 * W;
            if (col >= s.cols) break;
            float value[W];
            std::uint64_t bits = 0;
#pragma unroll
            for (int i = 0; i < W; ++i) {
                if (i % noise_columns == 0)
                    bits = mixed(counter + static_cast<std::uint64_t>((col + i) / noise_columns) * splitmix_step);
                const int shift = noise_bits * (W == 1 ? static_cast<int>(col % noise_columns) : i % noise_columns);
                const int n = static_cast<int>(bits >> shift & (levels - 1));
                value[i] = held[j][i] * __fmaf_rn(static_cast<float>(2 * n - (levels - 1)), step, 1.0f);
            }
            A::put(y, row * s.cols + col, value);
        }
    }
}

void jitter(const JitterShape& s, Src x, const std::int32_t* positions, const std::int32_t* noise, Dst y,
            void* stream) {
    if (s.tokens <= 0) return;
    const auto step = static_cast<float>(s.eps / (1 << noise_bits));
    with_access({x, y}, {s.cols}, [&](auto access) {
        jitter_kernel<decltype(access)>
            <<<blocks_for(s.tokens, rows_of_block), threads, 0, stream_of(stream)>>>(s, step, x, positions, noise, y);
    });
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_deviate(Kernels& table) {
    table.draw_normal = draw_normal;
    table.jitter = jitter;
}

} // namespace moe::cuda
