// Rotary angles of one position in shared memory, and the turn of a pair of elements.
#pragma once

#include "kernels/cuda/vector.cuh"

namespace moe::cuda {

struct Turn {
    float cosine, sine;
};

// Angle i of a position: position * theta^(-i / half), the frequency rounded to FP32 as in the published models. The
// product is reduced to one turn in double: an FP32 angle of some 10^5 radians has lost its third decimal.
__device__ inline float frequency_of(int i, int half, double theta, const RopeScale& scale) {
    const double f = pow(theta, -static_cast<double>(i) / half), u = scale.turns > 0.0 ? f * scale.turns : i;
    const double keep = fmin(fmax((u - scale.low) / (scale.high - scale.low), 0.0), 1.0);
    return static_cast<float>(f * (keep + (1.0 - keep) / scale.factor));
}
__device__ inline Turn turn_of(std::int32_t position, float frequency, float magnitude) {
    constexpr double per_radian = 0.15915494309189533577; // 1 / (2 pi)
    const double turns = static_cast<double>(position) * static_cast<double>(frequency) * per_radian;
    Turn turn;
    sincospif(2.0f * static_cast<float>(turns - rint(turns)), &turn.sine, &turn.cosine);
    turn.sine *= magnitude;
    turn.cosine *= magnitude;
    return turn;
}

// The factor of queries at a position.
__device__ inline float factor_of(const QueryScale& s, std::int32_t position) {
    return s.beta == 0.0 ? 1.0f : static_cast<float>(1.0 + s.beta * log1p(floor((position + s.offset) / s.positions)));
}

// The columns of pair i of a head's rotary part.
struct Pair {
    int first, second;
    __device__ Pair(int i, int half, bool interleaved)
        : first(interleaved ? 2 * i : i), second(interleaved ? 2 * i + 1 : i + half) {}
};

// Turns forward with sign 1, back (the transpose) with sign -1.
__device__ inline void apply(Turn turn, float sign, float& first, float& second) {
    const float x = first, y = second, s = sign * turn.sine;
    first = x * turn.cosine - y * s;
    second = y * turn.cosine + x * s;
}

// Turns two packs that hold W pairs: pair j is (x[j], y[j]), or, interleaved, two neighbours of what lies in x and then
// y.
template <int W>
__device__ void apply_all(const Turn (&turn)[W], float sign, bool interleaved, float (&x)[W], float (&y)[W]) {
#pragma unroll
    for (int j = 0; j < W; ++j) {
        if (!interleaved) {
            apply(turn[j], sign, x[j], y[j]);
        } else if (j < W / 2) {
            apply(turn[j], sign, x[2 * j], x[2 * j + 1]);
        } else {
            apply(turn[j], sign, y[2 * j - W], y[2 * j - W + 1]);
        }
    }
}

// Fills turns[half] for one position, all threads of the block together, and waits for it.
__device__ inline void fill_turns(Turn* turns, int half, double theta, const RopeScale& scale, std::int32_t position) {
    for (int i = static_cast<int>(threadIdx.x); i < half; i += static_cast<int>(blockDim.x)) {
        turns[i] = turn_of(position, frequency_of(i, half, theta, scale), static_cast<float>(scale.magnitude));
    }
    __syncthreads();
}

} // namespace moe::cuda
