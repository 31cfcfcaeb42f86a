// Latent attention's heads in packs: a block per token, and in each warp several heads side by side.
#include "kernels/cuda/mla_packs.hpp"

#include "kernels/cuda/rotation.cuh"
#include "kernels/cuda/rows.cuh"

namespace moe::cuda {
namespace {

constexpr int most_rope = 256, most_warps = 32;

// A block is a token; each of its warps has as many heads as hold their rotary packs side by side in its lanes, two
// packs that turn into each other per lane.
template <class A>
struct Part {
    static constexpr int W = A::width;
    int pairs, sides;  // lanes of a head, heads of a warp
    int head, heads;   // the first of this warp, and how many
    int mine;          // this lane's head, beyond `heads` if it has none
    int pair;          // of its packs, which hold pairs [pair W, pair W + W) of elements
    int first, second; // columns of the two packs among the rotary ones
    std::int64_t row;
    __device__ explicit Part(const MlaRopeShape& s)
        : pairs(s.rope / (2 * W)),
          sides(warp_size / pairs),
          head(static_cast<int>(threadIdx.x) / warp_size * sides),
          heads(head + sides <= s.heads ? sides : s.heads - head),
          mine(lane_of_warp() / pairs),
          pair(lane_of_warp() % pairs),
          first(s.interleaved ? 2 * pair * W : pair * W),
          second(s.interleaved ? first + W : first + s.rope / 2),
          row(blockIdx.x) {}
    __device__ bool has_head() const { return mine < heads; }
    // Row of this lane's or the warp's h-th head among all heads of all tokens.
    __device__ std::int64_t at(const MlaRopeShape& s, int h) const { return row * s.heads + head + h; }
};

template <class A>
struct TwoPacks {
    float x[A::width], y[A::width];
    __device__ void read(Src from, std::int64_t start, const Part<A>& part) {
        const auto a = A::take(from, start + part.first), b = A::take(from, start + part.second);
#pragma unroll
        for (int j = 0; j < A::width; ++j) x[j] = a[j], y[j] = b[j];
    }
    __device__ void write(Dst to, std::int64_t start, const Part<A>& part) const {
        A::put(to, start + part.first, x);
        A::put(to, start + part.second, y);
    }
};

// This lane's turns at a position; the block computes each frequency once, since a power in double takes long.
template <class A>
__device__ void turns_of(const MlaRopeShape& s, const Part<A>& part, std::int32_t position, Turn (&turn)[A::width]) {
    __shared__ Turn all[most_rope / 2];
    fill_turns(all, s.rope / 2, s.theta, s.scale, position);
#pragma unroll
    for (int j = 0; j < A::width; ++j) turn[j] = all[part.pair * A::width + j];
}

// The columns of the warp's heads that no position turns: `width` of each row of `from` go to the rows of `to`.
template <class A>
__device__ void move_columns(const MlaRopeShape& s, const Part<A>& part, int width, Src from, std::int64_t from_stride,
                             std::int64_t from_column, Dst to, std::int64_t to_stride, std::int64_t to_column) {
    constexpr int W = A::width;
    const int packs = width / W;
    const auto place = [&](int p, std::int64_t stride, std::int64_t column) {
        return part.at(s, p / packs) * stride + column + p % packs * W;
    };
    for_each_pack<4>(
        part.heads * packs, [&](int p) { return A::take(from, place(p, from_stride, from_column)); },
        [&](int p, const typename A::Held& held) { A::put(to, place(p, to_stride, to_column), held); });
}

template <class A>
__global__ void __launch_bounds__(most_warps* warp_size)
    mla_packs_kernel(MlaRopeShape s, Src q, Src kv, Src kv_down, const std::int32_t* positions, Dst q_out, Dst k,
                     Dst v) {
    const std::int64_t qk = s.nope + s.rope, source = s.nope + s.v;
    const Part<A> part(s);
    Turn turn[A::width];
    turns_of(s, part, positions[part.row / s.batch], turn);
    if (part.has_head()) {
        const std::int64_t start = part.at(s, part.mine) * qk + s.nope;
        TwoPacks<A> query, key;
        query.read(q, start, part);
        key.read(kv_down, part.row * (s.kv_lora + s.rope) + s.kv_lora, part);
        apply_all(turn, 1.0f, s.interleaved, query.x, query.y);
        apply_all(turn, 1.0f, s.interleaved, key.x, key.y);
        query.write(q_out, start, part);
        key.write(k, start, part);
    }
    move_columns(s, part, s.nope, kv, source, 0, k, qk, 0);
    move_columns(s, part, s.v, kv, source, s.nope, v, s.v, 0);
    if (q.data != q_out.data) move_columns(s, part, s.nope, q, qk, 0, q_out, qk, 0);
}

template <class A>
__global__ void __launch_bounds__(most_warps* warp_size)
    mla_grad_packs_kernel(MlaRopeShape s, Src dq_out, Src dk, Src dv, const std::int32_t* positions, Dst dq, Dst dkv,
                          Dst dkv_down) {
    constexpr int W = A::width;
    __shared__ float sums[most_warps][most_rope];
    const std::int64_t qk = s.nope + s.rope, source = s.nope + s.v;
    const Part<A> part(s);
    Turn turn[W];
    turns_of(s, part, positions[part.row / s.batch], turn);
    TwoPacks<A> key{};
    if (part.has_head()) {
        const std::int64_t start = part.at(s, part.mine) * qk + s.nope;
        TwoPacks<A> query;
        query.read(dq_out, start, part);
        key.read(dk, start, part);
        apply_all(turn, -1.0f, s.interleaved, query.x, query.y);
        query.write(dq, start, part);
    }
    // The angle is the same for all heads: turning their sum back is turning each back.
    const int warp = static_cast<int>(threadIdx.x) / warp_size, warps = static_cast<int>(blockDim.x) / warp_size;
#pragma unroll
    for (int j = 0; j < W; ++j) {
        for (int offset = part.pairs; offset < warp_size; offset *= 2) {
            key.x[j] += __shfl_xor_sync(all_lanes, key.x[j], offset);
            key.y[j] += __shfl_xor_sync(all_lanes, key.y[j], offset);
        }
        sums[warp][part.first + j] = key.x[j]; // heads side by side hold the same number
        sums[warp][part.second + j] = key.y[j];
    }
    move_columns(s, part, s.nope, dk, qk, 0, dkv, source, 0);
    move_columns(s, part, s.v, dv, s.v, 0, dkv, source, s.nope);
    if (dq.data != dq_out.data) move_columns(s, part, s.nope, dq_out, qk, 0, dq, qk, 0);
    __syncthreads();
    if (warp != 0 || part.mine != 0) return;
#pragma unroll
    for (int j = 0; j < W; ++j) {
        key.x[j] = key.y[j] = 0.0f;
        for (int w = 0; w < warps; ++w) key.x[j] += sums[w][part.first + j], key.y[j] += sums[w][part.second + j];
    }
    apply_all(turn, -1.0f, s.interleaved, key.x, key.y);
    const std::int64_t start = part.row * (s.kv_lora + s.rope) + s.kv_lora;
#pragma unroll
    for (int j = 0; j < W; ++j) {
        store(dkv_down, start + part.first + j, key.x[j]);
        store(dkv_down, start + part.second + j, key.y[j]);
    }
}

// run(Access, threads) where every part of a head is whole packs and a block holds a token.
template <class Run>
bool with_parts(const MlaRopeShape& s, std::initializer_list<Src> operands, std::int64_t latent, Run run) {
    bool done = false;
    with_access(operands, {s.nope, s.v, s.rope, latent}, [&](auto access) {
        using A = decltype(access);
        if constexpr (A::width > 1) {
            const int pairs = s.rope / (2 * A::width);
            if (s.rope % (2 * A::width) != 0 || s.rope > most_rope || pairs > warp_size || (pairs & (pairs - 1)) != 0)
                return;
            const int warps = ceil_div(s.heads, warp_size / pairs);
            if (warps > most_warps) return;
            done = true;
            run(access, warps * warp_size);
            CUDA_CHECK(cudaGetLastError());
        }
    });
    return done;
}

} // namespace

bool mla_rope_packs(const MlaRopeShape& s, Src q, Src kv, Src kv_down, const std::int32_t* positions, Dst q_out, Dst k,
                    Dst v, void* stream) {
    return with_parts(s, {q, kv, kv_down, q_out, k, v}, s.kv_lora, [&](auto access, int threads) {
        mla_packs_kernel<decltype(access)>
            <<<blocks_for(s.tokens, 1), threads, 0, stream_of(stream)>>>(s, q, kv, kv_down, positions, q_out, k, v);
    });
}

bool mla_rope_grad_packs(const MlaRopeShape& s, Src dq_out, Src dk, Src dv, const std::int32_t* positions, Dst dq,
                         Dst dkv, Dst dkv_down, void* stream) {
    return with_parts(s, {dq_out, dk, dv, dq, dkv}, 0, [&](auto access, int threads) {
        mla_grad_packs_kernel<decltype(access)><<<blocks_for(s.tokens, 1), threads, 0, stream_of(stream)>>>(
            s, dq_out, dk, dv, positions, dq, dkv, dkv_down);
    });
}

} // namespace moe::cuda
