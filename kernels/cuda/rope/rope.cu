// Rotary embedding of packed query, key and value heads with optional QK-norm, forward and backward: any width and
// type.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/rope/rope_packs.hpp"
#include "kernels/cuda/rope/rotation.cuh"

namespace moe::cuda {
namespace {

constexpr int threads = 256, warps = threads / warp_size;
// A block of the weight gradients: few columns so that a small head still fills many blocks, each row of theirs being
// one 32-byte sector of memory.
constexpr int sum_cols = 8, sum_rows = 128;

// One token's heads: a warp takes every warps-th one.
struct Head {
    std::int64_t at; // first element of the head
    bool query;
    int index; // number of the head among the query and key heads
};
__device__ int value_width(const RopeShape& s) { return s.v_dim > 0 ? s.v_dim : s.head_dim; }
__device__ std::int64_t row_width(const RopeShape& s) {
    return std::int64_t{s.heads + s.kv_heads} * s.head_dim + std::int64_t{s.kv_heads} * value_width(s);
}
__device__ Head head_of(const RopeShape& s, std::int64_t row, int h) {
    return {row * row_width(s) + std::int64_t{h} * s.head_dim, h < s.heads, h};
}
// A weight of a norm; without weights each is 1.
__device__ float weight_at(Src w, std::int64_t c) { return w.data != nullptr ? load(w, c) : 1.0f; }

__device__ void copy_values(const RopeShape& s, Src from, Dst to, std::int64_t row) {
    const std::int64_t at = row * row_width(s) + std::int64_t{s.heads + s.kv_heads} * s.head_dim;
    if (from.data == to.data) return;
    copy_row(from, at, to, at, std::int64_t{s.kv_heads} * value_width(s), static_cast<int>(threadIdx.x), threads);
}

// Calls run(column, first column's partner or -1, turn) for the columns of a head that this lane owns.
template <class Run>
__device__ void for_each_pair(const RopeShape& s, const Turn* turns, Run run) {
    const int half = s.rotary_dim / 2, lane = static_cast<int>(threadIdx.x % warp_size);
    for (int i = lane; i < half; i += warp_size) {
        const Pair pair(i, half, s.interleaved);
        run(pair.first, pair.second, turns[i]);
    }
    for (int c = 2 * half + lane; c < s.head_dim; c += warp_size) run(c, -1, Turn{1.0f, 0.0f});
}

__global__ void __launch_bounds__(threads)
    rope_kernel(RopeShape s, Src qkv, const std::int32_t* positions, Src wq, Src wk, Dst out, float* rstd) {
    extern __shared__ Turn turns[];
    const std::int64_t row = blockIdx.x;
    fill_turns(turns, s.rotary_dim / 2, s.theta, s.scale, positions[row / s.batch]);
    const int turned = s.heads + s.kv_heads, lane = static_cast<int>(threadIdx.x % warp_size);
    for (int h = static_cast<int>(threadIdx.x / warp_size); h < turned; h += warps) {
        const Head head = head_of(s, row, h);
        const Src w = head.query ? wq : wk;
        float scale = 1.0f;
        if (s.norm) {
            float squares = 0.0f;
            for (int c = lane; c < s.head_dim; c += warp_size) {
                const float value = load(qkv, head.at + c);
                squares += value * value;
            }
            const float mean = warp_sum(squares) / static_cast<float>(s.head_dim);
            scale = 1.0f / sqrtf(mean + static_cast<float>(s.eps));
            if (lane == 0) rstd[row * turned + h] = scale;
        }
        const float by = head.query ? factor_of(s.query_scale, positions[row / s.batch]) : 1.0f;
        // Every lane writes only what it alone reads, so that out may be qkv.
        for_each_pair(s, turns, [&](int first, int second, Turn turn) {
            float x = load(qkv, head.at + first), y = second >= 0 ? load(qkv, head.at + second) : 0.0f;
            if (s.norm_behind) apply(turn, 1.0f, x, y);
            if (s.norm) {
                x *= weight_at(w, first) * scale;
                if (second >= 0) y *= weight_at(w, second) * scale;
            }
            if (!s.norm_behind) apply(turn, 1.0f, x, y);
            store(out, head.at + first, x * by);
            if (second >= 0) store(out, head.at + second, y * by);
        });
    }
    copy_values(s, qkv, out, row);
}

__global__ void __launch_bounds__(threads) rope_grad_kernel(RopeShape s, RopeGradients in, Dst dqkv) {
    extern __shared__ Turn turns[];
    const std::int64_t row = blockIdx.x;
    fill_turns(turns, s.rotary_dim / 2, s.theta, s.scale, in.positions[row / s.batch]);
    const int turned = s.heads + s.kv_heads;
    for (int h = static_cast<int>(threadIdx.x / warp_size); h < turned; h += warps) {
        const Head head = head_of(s, row, h);
        const Src w = head.query ? in.wq : in.wk;
        const float scale = s.norm ? in.rstd[row * turned + h] : 1.0f;
        const float by = head.query ? factor_of(s.query_scale, in.positions[row / s.batch]) : 1.0f;
        // The gradient where the norm is, and what it has normed: behind the rotation or before it.
        const auto at_norm = [&](int first, int second, Turn turn, float& x, float& y) {
            x = load(in.dout, head.at + first) * by;
            y = second >= 0 ? load(in.dout, head.at + second) * by : 0.0f;
            if (!s.norm_behind) apply(turn, -1.0f, x, y);
        };
        const auto normed = [&](int first, int second, Turn turn, float& x, float& y) {
            x = load(in.qkv, head.at + first);
            y = second >= 0 ? load(in.qkv, head.at + second) : 0.0f;
            if (s.norm_behind) apply(turn, 1.0f, x, y);
        };
        float along = 0.0f;
        if (s.norm) {
            for_each_pair(s, turns, [&](int first, int second, Turn turn) {
                float x, y, from_x, from_y;
                at_norm(first, second, turn, x, y);
                normed(first, second, turn, from_x, from_y);
                along += x * weight_at(w, first) * from_x;
                if (second >= 0) along += y * weight_at(w, second) * from_y;
            });
            along = warp_sum(along) * scale * scale * scale / static_cast<float>(s.head_dim);
        }
        for_each_pair(s, turns, [&](int first, int second, Turn turn) {
            float x, y;
            at_norm(first, second, turn, x, y);
            if (s.norm) {
                float from_x, from_y;
                normed(first, second, turn, from_x, from_y);
                x = x * weight_at(w, first) * scale - from_x * along;
                if (second >= 0) y = y * weight_at(w, second) * scale - from_y * along;
            }
            if (s.norm_behind) apply(turn, -1.0f, x, y);
            store(dqkv, head.at + first, x);
            if (second >= 0) store(dqkv, head.at + second, y);
        });
    }
    copy_values(s, in.dout, dqkv, row);
}

// dw[c] += sum over tokens and heads of (dout turned back)[c] x[c] rstd; blockIdx.y 0: query heads, 1: key heads.
__global__ void __launch_bounds__(sum_cols* sum_rows)
    rope_weight_kernel(RopeShape s, RopeGradients in, float* dwq, float* dwk) {
    __shared__ float part[sum_rows][sum_cols + 1];
    const int half = s.rotary_dim / 2, turned = s.heads + s.kv_heads;
    const int lane = static_cast<int>(threadIdx.x % sum_cols), slice = static_cast<int>(threadIdx.x / sum_cols);
    const int c = static_cast<int>(blockIdx.x) * sum_cols + lane;
    const int from = blockIdx.y == 0 ? 0 : s.heads, to = blockIdx.y == 0 ? s.heads : turned;
    const bool turns = c < 2 * half;
    const int i = !turns ? 0 : s.interleaved ? c / 2 : c % half;
    const Pair pair(i, half, s.interleaved);
    const float frequency = turns ? frequency_of(i, half, s.theta, s.scale) : 0.0f;
    float sum = 0.0f;
    for (std::int64_t row = slice; c < s.head_dim && row < s.tokens; row += sum_rows) {
        const Turn turn = turns ? turn_of(in.positions[row / s.batch], frequency, static_cast<float>(s.scale.magnitude))
                                : Turn{1.0f, 0.0f};
        const float by = blockIdx.y == 0 ? factor_of(s.query_scale, in.positions[row / s.batch]) : 1.0f;
        for (int h = from; h < to; ++h) {
            const std::int64_t at = head_of(s, row, h).at;
            // Of gradient and normed value, the one on the other side of the rotation is turned to where the norm is.
            const Src turned_one = s.norm_behind ? in.qkv : in.dout, other = s.norm_behind ? in.dout : in.qkv;
            float x = load(turned_one, at + (turns ? pair.first : c)),
                  y = turns ? load(turned_one, at + pair.second) : 0.0f;
            apply(turn, s.norm_behind ? 1.0f : -1.0f, x, y);
            sum += (turns && c == pair.second ? y : x) * load(other, at + c) * in.rstd[row * turned + h] * by;
        }
    }
    part[slice][lane] = sum;
    __syncthreads();
    if (slice != 0 || c >= s.head_dim) return;
    sum = 0.0f;
    for (int j = 0; j < sum_rows; ++j) sum += part[j][lane];
    (blockIdx.y == 0 ? dwq : dwk)[c] += sum;
}

std::size_t shared_bytes(const RopeShape& s) { return static_cast<std::size_t>(s.rotary_dim / 2) * sizeof(Turn); }

void rope(const RopeShape& s, Src qkv, const std::int32_t* positions, Src wq, Src wk, Dst out, float* rstd,
          void* stream) {
    if (s.tokens <= 0 || rope_packs(s, qkv, positions, wq, wk, out, rstd, stream)) return;
    rope_kernel<<<blocks_for(s.tokens, 1), threads, shared_bytes(s), stream_of(stream)>>>(s, qkv, positions, wq, wk,
                                                                                          out, rstd);
    CUDA_CHECK(cudaGetLastError());
}

void rope_grad(const RopeShape& s, Src dout, const std::int32_t* positions, Src qkv, Src wq, Src wk, const float* rstd,
               Dst dqkv, float* dwq, float* dwk, void* stream) {
    if (s.tokens <= 0) return;
    const RopeGradients in{dout, positions, qkv, wq, wk, rstd};
    if (rope_grad_packs(s, in, dqkv, dwq, dwk, stream)) return;
    if (s.norm && dwq != nullptr) { // dout may be dqkv, so this comes before dqkv is written.
        const dim3 grid(blocks_for(s.head_dim, sum_cols), 2);
        rope_weight_kernel<<<grid, sum_cols * sum_rows, 0, stream_of(stream)>>>(s, in, dwq, dwk);
        CUDA_CHECK(cudaGetLastError());
    }
    rope_grad_kernel<<<blocks_for(s.tokens, 1), threads, shared_bytes(s), stream_of(stream)>>>(s, in, dqkv);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_rope(Kernels& table) {
    table.rope = rope;
    table.rope_grad = rope_grad;
}

} // namespace moe::cuda
