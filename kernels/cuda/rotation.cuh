// Rotary angles of one position in shared memory, and the turn of a pair of elements.
#pragma once

#include "kernels/cuda/device.cuh"

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
    constexpr double full = 6.283185307179586476925286766559;
    const double angle = static_cast<double>(position) * static_cast<double>(frequency);
    Turn turn;
    sincosf(static_cast<float>(angle - full * rint(angle / full)), &turn.sine, &turn.cosine);
    turn.sine *= magnitude;
    turn.cosine *= magnitude;
    return turn;
}

// Where pair i of a head's rotary part lies.
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

// Fills turns[half] for one position, all threads of the block together, and waits for it.
__device__ inline void fill_turns(Turn* turns, int half, double theta, const RopeScale& scale, std::int32_t position) {
    for (int i = static_cast<int>(threadIdx.x); i < half; i += static_cast<int>(blockDim.x)) {
        turns[i] = turn_of(position, frequency_of(i, half, theta, scale), static_cast<float>(scale.magnitude));
    }
    __syncthreads();
}

} // namespace moe::cuda
