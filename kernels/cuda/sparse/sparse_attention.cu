// Attention over picked keys: a block for each row and head, whose warps take turns with the keys. Gradients of queries
// likewise; those of a key by a block of its own, whose warps take turns with the queries that have picked it.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/sparse/sparse.cuh"
#include "kernels/cuda/sparse/sparse.hpp"

#include <type_traits>

namespace moe::cuda {
namespace {

constexpr int warps = 4, threads = warps * warp_size, widest = 640;

struct Operands {
    LatentShape s;
    Src dout, q, k, o;
    const std::int32_t* keys;
    Dst out, dq, dk;
    float* lse;
};

// Sums of the warps' rows of columns, in their order; all threads come.
template <int columns, class Store>
__device__ void add_warps(const float (&own)[columns], int width, Store store_at) {
    __shared__ float all[warps][columns * warp_size];
    const int lane = static_cast<int>(threadIdx.x) % warp_size, warp = static_cast<int>(threadIdx.x) / warp_size;
    __syncthreads();
#pragma unroll
    for (int c = 0; c < columns; ++c) all[warp][lane + c * warp_size] = own[c];
    __syncthreads();
    for (int at = static_cast<int>(threadIdx.x); at < width; at += threads) {
        float sum = 0.0f;
        for (int w = 0; w < warps; ++w) sum += all[w][at];
        store_at(at, sum);
    }
}

template <int columns>
__device__ void take_row(Src x, std::int64_t from, int width, float scale, float (&row)[columns]) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
#pragma unroll
    for (int c = 0; c < columns; ++c) {
        const int at = lane + c * warp_size;
        row[c] = at < width ? load(x, from + at) * scale : 0.0f;
    }
}

// Products of rows that lanes hold, the same in all of them.
template <int columns>
__device__ float dot(const float (&x)[columns], const float (&y)[columns]) {
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < columns; ++c) sum += x[c] * y[c];
    return warp_sum(sum);
}

// `columns`: those that each lane of a warp has of a row of keys, whose first are the value.
template <int columns>
__global__ void __launch_bounds__(threads) attend_kernel(Operands in) {
    const LatentShape& s = in.s;
    const KeyPlaces z{s.keys};
    const std::int64_t row = blockIdx.x, h = blockIdx.y, rows = z.rows();
    const int lane = static_cast<int>(threadIdx.x) % warp_size, warp = static_cast<int>(threadIdx.x) / warp_size;
    const KeyList list(z, in.keys, row);
    float query[columns], key[columns], out[columns] = {};
    take_row(in.q, (row * s.heads + h) * s.qk_dim, s.qk_dim, static_cast<float>(s.scale), query);
    LogSum total;
    for (std::int64_t j = warp; j < list.count; j += warps) {
        take_row(in.k, z.row_of(list.at(j), list.sequence) * s.qk_dim, s.qk_dim, 1.0f, key);
        const float logit = dot(query, key), before = total.most;
        total.add(logit);
        const float factor = before == -INFINITY ? 0.0f : expf(before - total.most), p = expf(logit - total.most);
#pragma unroll
        for (int c = 0; c < columns; ++c) out[c] = out[c] * factor + p * key[c];
    }
    __shared__ float most[warps], sums[warps];
    if (lane == 0) most[warp] = total.most, sums[warp] = total.sum;
    __syncthreads();
    LogSum all;
    for (int w = 0; w < warps; ++w) all.add({most[w], sums[w]});
    const float lse = all.log(), factor = total.most == -INFINITY ? 0.0f : expf(total.most - lse);
#pragma unroll
    for (int c = 0; c < columns; ++c) out[c] *= factor;
    add_warps(out, s.v_dim, [&](int at, float sum) { store(in.out, (row * s.heads + h) * s.v_dim + at, sum); });
    if (threadIdx.x == 0) in.lse[h * rows + row] = lse;
}

template <int columns>
__global__ void __launch_bounds__(threads) query_grad_kernel(Operands in) {
    const LatentShape& s = in.s;
    const KeyPlaces z{s.keys};
    const std::int64_t row = blockIdx.x, h = blockIdx.y, head = row * s.heads + h;
    const int warp = static_cast<int>(threadIdx.x) / warp_size;
    const KeyList list(z, in.keys, row);
    float query[columns], dvalue[columns], key[columns], sum[columns] = {};
    take_row(in.q, head * s.qk_dim, s.qk_dim, static_cast<float>(s.scale), query);
    take_row(in.dout, head * s.v_dim, s.v_dim, 1.0f, dvalue);
    const float along = warp_dot(in.dout, head * s.v_dim, in.o, head * s.v_dim, s.v_dim),
                lse = in.lse[h * z.rows() + row];
    for (std::int64_t j = warp; j < list.count; j += warps) {
        take_row(in.k, z.row_of(list.at(j), list.sequence) * s.qk_dim, s.qk_dim, 1.0f, key);
        const float p = expf(dot(query, key) - lse), ds = p * (dot(dvalue, key) - along) * static_cast<float>(s.scale);
#pragma unroll
        for (int c = 0; c < columns; ++c) sum[c] += ds * key[c];
    }
    add_warps(sum, s.qk_dim, [&](int at, float value) { store(in.dq, head * s.qk_dim + at, value); });
}

template <int columns>
__global__ void __launch_bounds__(threads) key_grad_kernel(Operands in) {
    const LatentShape& s = in.s;
    const KeyPlaces z{s.keys};
    const std::int64_t position = blockIdx.x / s.keys.batch, sequence = blockIdx.x % s.keys.batch,
                       at_key = z.row_of(position, sequence) * s.qk_dim;
    const int warp = static_cast<int>(threadIdx.x) / warp_size;
    float key[columns], query[columns], dvalue[columns], sum[columns] = {};
    take_row(in.k, at_key, s.qk_dim, 1.0f, key);
    for (std::int64_t i = warp; i < s.keys.seq_q; i += warps) {
        const std::int64_t row = i * s.keys.batch + sequence;
        if (z.position(i) < position || !KeyList(z, in.keys, row).holds(position)) continue;
        for (int h = 0; h < s.heads; ++h) {
            const std::int64_t head = row * s.heads + h;
            take_row(in.q, head * s.qk_dim, s.qk_dim, static_cast<float>(s.scale), query);
            take_row(in.dout, head * s.v_dim, s.v_dim, 1.0f, dvalue);
            const float along = warp_dot(in.dout, head * s.v_dim, in.o, head * s.v_dim, s.v_dim);
            const float p = expf(dot(query, key) - in.lse[h * z.rows() + row]), ds = p * (dot(dvalue, key) - along);
#pragma unroll
            for (int c = 0; c < columns; ++c) sum[c] += ds * query[c] + p * dvalue[c]; // The query has the scale.
        }
    }
    add_warps(sum, s.qk_dim, [&](int at, float value) { store(in.dk, at_key + at, value); });
}

void check_widths(const LatentShape& s) {
    require(s.qk_dim <= widest, "the width of a latent key", s.qk_dim, widest);
    require(s.v_dim <= s.qk_dim, "the width of a latent value", s.v_dim, s.qk_dim);
}

// Calls run with the number of columns that a lane holds.
template <class Run>
void with_columns(int width, Run run) {
    if (width <= 256)
        run(std::integral_constant<int, 256 / warp_size>{});
    else
        run(std::integral_constant<int, widest / warp_size>{});
}

void attention_picked(const LatentShape& s, Src q, Src k, const std::int32_t* keys, Dst o, float* lse, void* stream) {
    if (s.keys.rows() <= 0 || s.heads <= 0) return;
    check_widths(s);
    const Operands in{s, {}, q, k, {}, keys, o, {}, {}, lse};
    const dim3 grid(blocks_for(s.keys.rows(), 1), static_cast<unsigned>(s.heads));
    with_columns(s.qk_dim, [&](auto columns) {
        attend_kernel<decltype(columns)::value><<<grid, threads, 0, stream_of(stream)>>>(in);
    });
    CUDA_CHECK(cudaGetLastError());
}

void attention_picked_grad(const LatentShape& s, Src dout, Src q, Src k, Src o, const float* lse,
                           const std::int32_t* keys, Dst dq, Dst dk, void* stream) {
    if (s.keys.rows() <= 0 || s.heads <= 0) return;
    check_widths(s);
    const Operands in{s, dout, q, k, o, keys, {}, dq, dk, const_cast<float*>(lse)};
    const dim3 grid(blocks_for(s.keys.rows(), 1), static_cast<unsigned>(s.heads));
    with_columns(s.qk_dim, [&](auto columns) {
        query_grad_kernel<decltype(columns)::value><<<grid, threads, 0, stream_of(stream)>>>(in);
        key_grad_kernel<decltype(columns)::value>
            <<<blocks_for(s.keys.batch * s.keys.seq_k, 1), threads, 0, stream_of(stream)>>>(in);
    });
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_sparse_attention(Kernels& table) {
    table.attention_picked = attention_picked;
    table.attention_picked_grad = attention_picked_grad;
}

} // namespace moe::cuda
