// The short causal convolution of a layer with a state: its shape as kernels read it.
#pragma once

#include "kernels/cuda/device.cuh"

namespace moe::cuda::conv {

inline constexpr int threads = 256, most_taps = 8;

__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

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

} // namespace moe::cuda::conv
