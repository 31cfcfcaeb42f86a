// Rotary embedding with a warp per token: each lane holds the two packs of a head that turn into each other.
#include "kernels/cuda/rope/rope_packs.hpp"

#include "kernels/cuda/rope/rope_packs.cuh"

namespace moe::cuda {
namespace {

// Queries, keys and values are one list of heads: values are passed on, if they go anywhere. The next heads are on
// their way while these are turned, and the first while their turns are made.
template <class A, bool norm>
__global__ void __launch_bounds__(row_threads, 2)
    rope_packs_kernel(RopeShape s, Src qkv, const std::int32_t* positions, Src wq, Src wk, Dst out, float* rstd) {
    constexpr int W = A::width, together = 2;
    const Lane<A> lane(s);
    const int turned = s.heads + s.kv_heads, heads = qkv.data == out.data ? turned : turned + s.kv_heads;
    __shared__ float frequency[most_pairs];
    __shared__ Turn turns[row_warps][most_pairs];
    fill_frequencies(s, frequency);
    typename A::Held weight[4]; // weights of queries and keys, first and second pack
    if constexpr (norm) {
        weight[0] = A::take(wq, lane.first), weight[1] = A::take(wq, lane.second);
        weight[2] = A::take(wk, lane.first), weight[3] = A::take(wk, lane.second);
    }
    for_each_row(nullptr, 0, s.tokens, [&](std::int64_t row) {
        const std::int64_t start = row * width_of(s);
        Heads<A, together> next;
        next.read(qkv, lane, start, s.head_dim, lane.side, heads);
        Turn turn[W];
        turns_of(s, lane, frequency, positions[row / s.batch], turns[threadIdx.x / warp_size], turn);
        for (int base = 0; base < heads; base += lane.sides * together) {
            const Heads<A, together> held = next;
            next.read(qkv, lane, start, s.head_dim, base + lane.side + lane.sides * together, heads);
#pragma unroll
            for (int t = 0; t < together; ++t) {
                const int h = base + lane.side + t * lane.sides;
                float scale = 1.0f;
                if constexpr (norm) {
                    float squares = 0.0f;
                    if (h < turned) {
#pragma unroll
                        for (int j = 0; j < W; ++j)
                            squares += held.first[t][j] * held.first[t][j] + held.second[t][j] * held.second[t][j];
                    }
                    scale = rsqrtf(lane.sum(squares) * lane.share + static_cast<float>(s.eps));
                    if (h < turned && lane_of_warp() % lane.lanes == 0) rstd[row * turned + h] = scale;
                }
                if (h >= heads) continue;
                const std::int64_t at = start + h * s.head_dim;
                if (h >= turned) {
                    A::put(out, at + lane.first, held.first[t]);
                    A::put(out, at + lane.second, held.second[t]);
                    continue;
                }
                float x[W], y[W];
                const bool query = h < s.heads;
#pragma unroll
                for (int j = 0; j < W; ++j) {
                    x[j] = held.first[t][j], y[j] = held.second[t][j];
                    if constexpr (norm) {
                        x[j] *= (query ? weight[0][j] : weight[2][j]) * scale;
                        y[j] *= (query ? weight[1][j] : weight[3][j]) * scale;
                    }
                }
                apply_all(turn, 1.0f, s.interleaved, x, y);
                A::put(out, at + lane.first, x);
                A::put(out, at + lane.second, y);
            }
        }
    });
}

} // namespace

bool rope_packs(const RopeShape& s, Src qkv, const std::int32_t* positions, Src wq, Src wk, Dst out, float* rstd,
                void* stream) {
    if (!s.norm) wq = wk = Src{};
    return with_heads(s, {qkv, out, wq, wk}, [&](auto access, auto norm) {
        constexpr auto kernel = rope_packs_kernel<decltype(access), norm()>;
        const unsigned blocks = even_blocks<kernel>(s.tokens);
        kernel<<<blocks, row_threads, 0, stream_of(stream)>>>(s, qkv, positions, wq, wk, out, rstd);
        CUDA_CHECK(cudaGetLastError());
    });
}

} // namespace moe::cuda
