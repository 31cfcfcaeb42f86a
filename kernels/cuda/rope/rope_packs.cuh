// Heads of whole packs with a warp per token: what RoPE and its gradient share.
#pragma once

#include "kernels/cuda/rope/rotation.cuh"
#include "kernels/cuda/rows.cuh"

namespace moe::cuda {

inline constexpr int most_pairs = warp_size * 8; // rotated pairs of a head that one warp holds

// The columns of every head that a lane holds: packs at `first` and `second`, turned by pairs [pair, pair + W) or,
// beyond the rotated columns, not at all. A warp holds several heads side by side.
template <class A>
struct Lane {
    static constexpr int W = A::width;
    int lanes, side, sides, first, second, pair;
    float share; // share of an element in the mean over a head
    bool turns;
    __device__ Lane(const RopeShape& s)
        : lanes(s.head_dim / (2 * W)),
          side(lane_of_warp() / lanes),
          sides(warp_size / lanes),
          share(1.0f / static_cast<float>(s.head_dim)) {
        const int l = lane_of_warp() % lanes;
        pair = l * W;
        turns = 2 * l * W < s.rotary_dim;
        first = turns && !s.interleaved ? l * W : 2 * l * W;
        second = turns && !s.interleaved ? first + s.rotary_dim / 2 : first + W;
    }
    // The sum over the lanes of a head; the whole warp comes.
    __device__ float sum(float value) const {
        for (int offset = lanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(all_lanes, value, offset);
        return value;
    }
};

// The frequencies of a head's pairs, which a block computes once: a power in double takes long.
__device__ inline void fill_frequencies(const RopeShape& s, float* frequency) {
    const int half = s.rotary_dim / 2;
    for (int i = static_cast<int>(threadIdx.x); i < half; i += row_threads) {
        frequency[i] = frequency_of(i, half, s.theta, s.scale);
    }
    __syncthreads();
}
// This lane's turns at a position. The warp makes each once, in `all` [rotary_dim / 2] of its own.
template <class A>
__device__ void turns_of(const RopeShape& s, const Lane<A>& lane, const float* frequency, std::int32_t position,
                         Turn* all, Turn (&turn)[A::width]) {
    __syncwarp(); // The previous row's turns have been read.
    for (int i = lane_of_warp(); i < s.rotary_dim / 2; i += warp_size)
        all[i] = turn_of(position, frequency[i], static_cast<float>(s.scale.magnitude));
    __syncwarp();
#pragma unroll
    for (int j = 0; j < A::width; ++j) turn[j] = lane.turns ? all[lane.pair + j] : Turn{1.0f, 0.0f};
}

__device__ inline std::int64_t width_of(const RopeShape& s) {
    return std::int64_t{s.heads + 2 * s.kv_heads} * s.head_dim;
}

// The two packs of each of a few heads that a lane works on together.
template <class A, int together>
struct Heads {
    typename A::Held first[together], second[together];
    __device__ void read(Src x, const Lane<A>& lane, std::int64_t start, int head_dim, int head, int heads) {
#pragma unroll
        for (int t = 0; t < together; ++t) {
            const int h = head + t * lane.sides;
            if (h >= heads) break;
            first[t] = A::take(x, start + h * head_dim + lane.first);
            second[t] = A::take(x, start + h * head_dim + lane.second);
        }
    }
};

// True where two packs per lane make up a head, and the rotated columns too.
template <class A>
bool fits(const RopeShape& s) {
    const int lanes = s.head_dim / (2 * A::width);
    const bool plain = !s.norm_behind && s.query_scale.beta == 0.0 && (s.v_dim == 0 || s.v_dim == s.head_dim);
    return plain && s.head_dim % (2 * A::width) == 0 && s.rotary_dim % (2 * A::width) == 0 && lanes <= warp_size &&
           (lanes & (lanes - 1)) == 0;
}

// Two blocks of a multiprocessor at most, since more rows at once come slower out of memory, and so many that every
// warp has as many rows as the next.
template <auto kernel>
unsigned even_blocks(std::int64_t tokens, std::size_t shared = 0) {
    const std::int64_t most = resident_blocks<kernel>(row_threads, tokens, row_warps, shared),
                       two = 2 * multiprocessors();
    const std::int64_t work = ceil_div(tokens, std::int64_t{row_warps}), rows = ceil_div(work, most < two ? most : two);
    return blocks_for(work, rows);
}

// Calls run(Access, norm) as constants; false where packs do not fit.
template <class Run>
bool with_heads(const RopeShape& s, std::initializer_list<Src> operands, Run run) {
    bool done = false;
    if (s.norm && std::data(operands)[operands.size() - 1].data == nullptr) return false; // a norm without weights
    with_access(operands, {s.head_dim}, [&](auto access) {
        using A = decltype(access);
        if constexpr (A::width > 1) {
            if (!fits<A>(s)) return;
            done = true;
            if (s.norm) {
                run(access, std::true_type{});
            } else {
                run(access, std::false_type{});
            }
        }
    });
    return done;
}

} // namespace moe::cuda
