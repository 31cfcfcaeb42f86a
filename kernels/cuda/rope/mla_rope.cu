// Latent attention's query, key and value heads from its projections, with one rotary key for all heads; and backward.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/rope/mla_packs.hpp"
#include "kernels/cuda/rope/rotation.cuh"

namespace moe::cuda {
namespace {

constexpr int threads = 256;

struct Widths { // elements of one token's row
    std::int64_t qk, source, down;
    __device__ explicit Widths(const MlaRopeShape& s)
        : qk(s.nope + s.rope), source(s.nope + s.v), down(s.kv_lora + s.rope) {}
};

// Turns the rotary part of every query head of a row, from x to y, which may be the same.
__device__ void turn_queries(const MlaRopeShape& s, Src x, Dst y, std::int64_t row, const Turn* turns, float sign,
                             std::int32_t position) {
    const float by = factor_of(s.query_scale, position);
    const Widths w(s);
    const int half = s.rope / 2;
    const std::int64_t start = row * s.heads * w.qk;
    for (int i = static_cast<int>(threadIdx.x); i < s.heads * half; i += threads) {
        const Pair pair(i % half, half, s.interleaved);
        const std::int64_t at = start + i / half * w.qk + s.nope;
        float first = load(x, at + pair.first), second = load(x, at + pair.second);
        apply(turns[i % half], sign, first, second);
        store(y, at + pair.first, first * by);
        store(y, at + pair.second, second * by);
    }
    if (x.data == y.data && by == 1.0f) return;
    for (int i = static_cast<int>(threadIdx.x); i < s.heads * s.nope; i += threads) {
        const std::int64_t at = start + i / s.nope * w.qk + i % s.nope;
        store(y, at, load(x, at) * by);
    }
}

__global__ void __launch_bounds__(threads) mla_rope_kernel(MlaRopeShape s, Src q, Src kv, Src kv_down,
                                                           const std::int32_t* positions, Dst q_out, Dst k, Dst v) {
    extern __shared__ Turn turns[];
    const Widths w(s);
    const int half = s.rope / 2, thread = static_cast<int>(threadIdx.x);
    float* shared_key = reinterpret_cast<float*>(turns + half); // [rope], turned
    const std::int64_t row = blockIdx.x;
    fill_turns(turns, half, s.theta, s.scale, positions[row / s.batch]);
    turn_queries(s, q, q_out, row, turns, 1.0f, positions[row / s.batch]);
    for (int i = thread; i < half; i += threads) {
        const Pair pair(i, half, s.interleaved);
        const std::int64_t at = row * w.down + s.kv_lora;
        float first = load(kv_down, at + pair.first), second = load(kv_down, at + pair.second);
        apply(turns[i], 1.0f, first, second);
        shared_key[pair.first] = first;
        shared_key[pair.second] = second;
    }
    __syncthreads();
    const int qk = static_cast<int>(w.qk);
    for (int i = thread; i < s.heads * qk; i += threads) {
        const int h = i / qk, c = i % qk;
        const std::int64_t from = (row * s.heads + h) * w.source + c;
        store(k, row * s.heads * w.qk + i, c < s.nope ? load(kv, from) : shared_key[c - s.nope]);
    }
    for (int i = thread; i < s.heads * s.v; i += threads) {
        const std::int64_t from = (row * s.heads + i / s.v) * w.source + s.nope + i % s.v;
        store(v, row * s.heads * s.v + i, load(kv, from));
    }
}

__global__ void __launch_bounds__(threads)
    mla_rope_grad_kernel(MlaRopeShape s, Src dq_out, Src dk, Src dv, const std::int32_t* positions, Dst dq, Dst dkv,
                         Dst dkv_down) {
    extern __shared__ Turn turns[];
    const Widths w(s);
    const int half = s.rope / 2, thread = static_cast<int>(threadIdx.x);
    const std::int64_t row = blockIdx.x;
    fill_turns(turns, half, s.theta, s.scale, positions[row / s.batch]);
    turn_queries(s, dq_out, dq, row, turns, -1.0f, positions[row / s.batch]);
    const int source = static_cast<int>(w.source);
    for (int i = thread; i < s.heads * source; i += threads) {
        const int c = i % source;
        const std::int64_t head = row * s.heads + i / source;
        const float value = c < s.nope ? load(dk, head * w.qk + c) : load(dv, head * s.v + c - s.nope);
        store(dkv, row * s.heads * w.source + i, value);
    }
    // The angle is the same for all heads: turning their sum back is turning each back.
    for (int i = thread; i < half; i += threads) {
        const Pair pair(i, half, s.interleaved);
        float first = 0.0f, second = 0.0f;
        for (int h = 0; h < s.heads; ++h) {
            const std::int64_t at = (row * s.heads + h) * w.qk + s.nope;
            first += load(dk, at + pair.first);
            second += load(dk, at + pair.second);
        }
        apply(turns[i], -1.0f, first, second);
        store(dkv_down, row * w.down + s.kv_lora + pair.first, first);
        store(dkv_down, row * w.down + s.kv_lora + pair.second, second);
    }
}

std::size_t shared_bytes(const MlaRopeShape& s) {
    return static_cast<std::size_t>(s.rope / 2) * sizeof(Turn) + static_cast<std::size_t>(s.rope) * sizeof(float);
}

void mla_rope(const MlaRopeShape& s, Src q, Src kv, Src kv_down, const std::int32_t* positions, Dst q_out, Dst k, Dst v,
              void* stream) {
    if (s.tokens <= 0 || mla_rope_packs(s, q, kv, kv_down, positions, q_out, k, v, stream)) return;
    mla_rope_kernel<<<blocks_for(s.tokens, 1), threads, shared_bytes(s), stream_of(stream)>>>(s, q, kv, kv_down,
                                                                                              positions, q_out, k, v);
    CUDA_CHECK(cudaGetLastError());
}

void mla_rope_grad(const MlaRopeShape& s, Src dq_out, Src dk, Src dv, const std::int32_t* positions, Dst dq, Dst dkv,
                   Dst dkv_down, void* stream) {
    if (s.tokens <= 0 || mla_rope_grad_packs(s, dq_out, dk, dv, positions, dq, dkv, dkv_down, stream)) return;
    mla_rope_grad_kernel<<<blocks_for(s.tokens, 1), threads, shared_bytes(s), stream_of(stream)>>>(
        s, dq_out, dk, dv, positions, dq, dkv, dkv_down);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_mla_rope(Kernels& table) {
    table.mla_rope = mla_rope;
    table.mla_rope_grad = mla_rope_grad;
}

} // namespace moe::cuda
