// The short causal convolution of a layer with a state: its shape as kernels read it, and what a thread holds of it.
#pragma once

#include "kernels/cuda/device.cuh"

namespace moe::cuda::conv {

inline constexpr int threads = 256, most_taps = 8;

// Of two instructions of special functions and two more: the compiler's own scale what is as small as 2^-126.
__device__ inline float sigmoid(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + y));
    return y;
}

// Strides of rows in elements.
struct Conv {
    int batch, taps, part, parts, seq;
    std::int64_t keys, values, columns, projected;
    const std::int32_t* starts;

    __host__ explicit Conv(const StateShape& s)
        : batch(static_cast<int>(s.batch)),
          taps(s.kernel),
          part(s.part),
          parts(s.parts),
          seq(static_cast<int>(s.seq())),
          keys(s.keys()),
          values(s.values()),
          columns(s.convolved()),
          projected(s.projected()),
          starts(s.document_start) {}
    // Of each channel, the row of the weights that is its own.
    __device__ std::int64_t weight_row(std::int64_t c) const {
        if (c < 2 * keys) return (c / keys * parts + part) * keys + c % keys;
        return 2 * keys * parts + part * values + c - 2 * keys;
    }
    // Rows before the position's, itself among them, that its convolution reads.
    __device__ int reach(int at, int b) const {
        const int seen = at - (starts != nullptr ? starts[std::int64_t{at} * batch + b] : 0) + 1;
        return seen < taps ? seen : taps;
    }
};

// What a thread holds of its channels: weights by how far back they reach, and as many rows as there are taps, that of
// a position at the position's remainder. Rows before the sequence are zeros.
template <class A, int taps>
struct Window {
    static constexpr int W = A::width;
    float tap[taps][W], base[W], x[taps][W];

    // Then comes the position `first`, at 0.
    __device__ Window(const Conv& s, Src p, Src w, Src bias, std::int64_t channel, int first, int b) {
        const std::int64_t row = s.weight_row(channel);
#pragma unroll
        for (int k = 0; k < W; ++k) {
            base[k] = bias.data != nullptr ? load(bias, row + k) : 0.0f;
#pragma unroll
            for (int j = 0; j < taps; ++j) tap[j][k] = j < s.taps ? load(w, (row + k) * s.taps + s.taps - 1 - j) : 0.0f;
        }
#pragma unroll
        for (int j = 1; j < taps; ++j) {
            typename A::Held held{};
            if (first >= j) held = A::take(p, (std::int64_t{first - j} * s.batch + b) * s.projected + channel);
            put(taps - j, held);
        }
    }
    __device__ void put(int place, const typename A::Held& row) {
#pragma unroll
        for (int k = 0; k < W; ++k) x[place][k] = row[k];
    }
    // Calls use(tap, place) for what the position at `place` reaches; all of it but where a document begins.
    template <class Use>
    static __device__ void reached(int reach, int place, Use use) {
        if (reach >= taps) {
#pragma unroll
            for (int j = 0; j < taps; ++j) use(j, (place - j + taps) % taps);
        } else {
#pragma unroll
            for (int j = 0; j < taps; ++j)
                if (j < reach) use(j, (place - j + taps) % taps);
        }
    }
    __device__ void sums(int reach, int place, float (&sum)[W]) const {
#pragma unroll
        for (int k = 0; k < W; ++k) sum[k] = base[k];
        reached(reach, place, [&](int j, int from) {
#pragma unroll
            for (int k = 0; k < W; ++k) sum[k] += tap[j][k] * x[from][k];
        });
    }
};

} // namespace moe::cuda::conv
