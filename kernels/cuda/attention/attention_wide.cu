// Attention of wide heads: a warp for each query, or for each key, whose columns its lanes keep in registers.
//
// Keys and values of one head come out of the first-level cache: the warps of a block go over them side by side. Each
// output is summed by one warp in a fixed order.
#include "kernels/cuda/attention/attention_wide.hpp"

#include "kernels/cuda/attention/attention.cuh"
#include "kernels/cuda/rows.cuh"

namespace moe::cuda {
namespace {

constexpr int widest = 512, columns = widest / warp_size, warps = attention_threads / warp_size;

struct Operands {
    Src dout, q, k, v, o, sinks;
    Dst out, dq, dk, dv;
    float* lse;
};

// A row of a head: column lane + 32 c in element c, zero beyond its width.
struct Row {
    float x[columns];

    __device__ Row() {
#pragma unroll
        for (int c = 0; c < columns; ++c) x[c] = 0.0f;
    }
    __device__ Row(Src from, std::int64_t start, int dim, float scale = 1.0f) {
#pragma unroll
        for (int c = 0; c < columns; ++c) {
            const int at = lane_of_warp() + c * warp_size;
            x[c] = at < dim ? load(from, start + at) * scale : 0.0f;
        }
    }
    // Of two rows, summed over the warp.
    __device__ float dot(const Row& other) const {
        float sum = 0.0f;
#pragma unroll
        for (int c = 0; c < columns; ++c) sum += x[c] * other.x[c];
        return warp_sum(sum);
    }
    __device__ void add(const Row& other, float factor, float keep = 1.0f) {
#pragma unroll
        for (int c = 0; c < columns; ++c) x[c] = x[c] * keep + other.x[c] * factor;
    }
    __device__ void write(Dst to, std::int64_t start, int dim, float scale, bool added = false) const {
#pragma unroll
        for (int c = 0; c < columns; ++c) {
            const int at = lane_of_warp() + c * warp_size;
            if (at < dim) store(to, start + at, x[c] * scale + (added ? load(read_back(to), start + at) : 0.0f));
        }
    }
};

__device__ std::int64_t at(HeadRows head, std::int64_t row) { return head.start + row * head.step; }
__device__ std::int64_t row_of_warp() { return std::int64_t{blockIdx.x} * warps + threadIdx.x / warp_size; }

__global__ void __launch_bounds__(attention_threads) wide_kernel(AttentionSizes z, Operands in) {
    const AttentionShape& s = z.s;
    const std::int64_t i = row_of_warp(), h = blockIdx.y, b = blockIdx.z, key_head = h / (s.heads / s.kv_heads);
    if (i >= s.seq_q) return;
    const Row q(in.q, at(z.q(b, h), i), s.qk_dim, static_cast<float>(s.scale));
    const std::int64_t to = at(z.o(b, h), i);
    float most = in.sinks.data != nullptr ? load(in.sinks, h) : -INFINITY;
    Row out;
    if (s.merge) {
        most = in.lse[z.lse(b, h, i)];
        out = Row(read_back(in.out), to, s.v_dim);
        __syncwarp(); // All lanes have read lse before one of them writes it.
    }
    float sum = most == -INFINITY ? 0.0f : 1.0f;
    for (std::int64_t j = z.first(b, i); j < z.last(i); ++j) {
        const float logit = q.dot(Row(in.k, at(z.k(b, key_head), j), s.qk_dim)), best = fmaxf(most, logit);
        const float factor = most == -INFINITY ? 0.0f : expf(most - best), p = expf(logit - best);
        out.add(Row(in.v, at(z.v(b, key_head), j), s.v_dim), p, factor);
        sum = sum * factor + p;
        most = best;
    }
    out.write(in.out, to, s.v_dim, sum > 0.0f ? 1.0f / sum : 0.0f); // A query that sees nothing yields zeros.
    if (lane_of_warp() == 0) in.lse[z.lse(b, h, i)] = sum > 0.0f ? most + logf(sum) : -INFINITY;
}

// What a query and a key give each other: its probability and the gradient of its logit.
struct Pair {
    float p, dlogit;
    __device__ Pair(const Row& q, const Row& k, const Row& dout, const Row& v, float lse, float along)
        : p(expf(q.dot(k) - lse)), dlogit(p * (dout.dot(v) - along)) {}
};

__global__ void __launch_bounds__(attention_threads) wide_query_grad_kernel(AttentionSizes z, Operands in) {
    const AttentionShape& s = z.s;
    const std::int64_t i = row_of_warp(), h = blockIdx.y, b = blockIdx.z, key_head = h / (s.heads / s.kv_heads);
    if (i >= s.seq_q) return;
    const auto scale = static_cast<float>(s.scale);
    const Row q(in.q, at(z.q(b, h), i), s.qk_dim, scale), dout(in.dout, at(z.o(b, h), i), s.v_dim);
    const float lse = in.lse[z.lse(b, h, i)], along = dout.dot(Row(in.o, at(z.o(b, h), i), s.v_dim));
    Row dq;
    for (std::int64_t j = z.first(b, i); j < z.last(i); ++j) {
        const Row k(in.k, at(z.k(b, key_head), j), s.qk_dim);
        dq.add(k, Pair(q, k, dout, Row(in.v, at(z.v(b, key_head), j), s.v_dim), lse, along).dlogit);
    }
    dq.write(in.dq, at(z.q(b, h), i), s.qk_dim, scale, s.merge);
}

// A key of one key head against all queries that see it, of all query heads that share it.
__global__ void __launch_bounds__(attention_threads) wide_key_grad_kernel(AttentionSizes z, Operands in) {
    const AttentionShape& s = z.s;
    const std::int64_t j = row_of_warp(), key_head = blockIdx.y, b = blockIdx.z, share = s.heads / s.kv_heads;
    if (j >= s.seq_k) return;
    const Row k(in.k, at(z.k(b, key_head), j), s.qk_dim), v(in.v, at(z.v(b, key_head), j), s.v_dim);
    const std::int64_t shift = s.seq_k - s.seq_q, begin = s.causal && !s.spread && j > shift ? j - shift : 0;
    Row dk, dv;
    for (std::int64_t h = key_head * share; h < (key_head + 1) * share; ++h) {
        for (std::int64_t i = begin; i < s.seq_q; ++i) {
            if (!z.sees(b, i, j)) continue;
            const Row q(in.q, at(z.q(b, h), i), s.qk_dim, static_cast<float>(s.scale)),
                dout(in.dout, at(z.o(b, h), i), s.v_dim);
            const float along = dout.dot(Row(in.o, at(z.o(b, h), i), s.v_dim));
            const Pair pair(q, k, dout, v, in.lse[z.lse(b, h, i)], along);
            dv.add(dout, pair.p);
            dk.add(q, pair.dlogit); // q carries the scale.
        }
    }
    dk.write(in.dk, at(z.k(b, key_head), j), s.qk_dim, 1.0f);
    dv.write(in.dv, at(z.v(b, key_head), j), s.v_dim, 1.0f);
}

dim3 grid(std::int64_t rows, int heads, const AttentionShape& s) {
    require(s.qk_dim <= widest, "the width of a query head", s.qk_dim, widest);
    require(s.v_dim <= widest, "the width of a value head", s.v_dim, widest);
    return {blocks_for(rows, warps), static_cast<unsigned>(heads), static_cast<unsigned>(s.batch)};
}

} // namespace

void wide_attention(const AttentionShape& s, Src q, Src k, Src v, Src sinks, Dst o, float* lse, void* stream) {
    const Operands in{{}, q, k, v, {}, sinks, o, {}, {}, {}, lse};
    wide_kernel<<<grid(s.seq_q, s.heads, s), attention_threads, 0, stream_of(stream)>>>(AttentionSizes(s), in);
    CUDA_CHECK(cudaGetLastError());
}

void wide_attention_grad(const AttentionShape& s, Src dout, Src q, Src k, Src v, Src o, const float* lse, Dst dq,
                         Dst dk, Dst dv, void* stream) {
    const Operands in{dout, q, k, v, o, {}, {}, dq, dk, dv, const_cast<float*>(lse)};
    wide_key_grad_kernel<<<grid(s.seq_k, s.kv_heads, s), attention_threads, 0, stream_of(stream)>>>(AttentionSizes(s),
                                                                                                    in);
    CUDA_CHECK(cudaGetLastError());
    wide_query_grad_kernel<<<grid(s.seq_q, s.heads, s), attention_threads, 0, stream_of(stream)>>>(AttentionSizes(s),
                                                                                                   in);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace moe::cuda
