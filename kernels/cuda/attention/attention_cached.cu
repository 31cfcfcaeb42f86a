// Attention over cached keys and values: a block for each row and head, whose warps take turns with the keys.
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/families.hpp"

namespace moe::cuda {
namespace {

constexpr int warps = 8, widest = 512;

struct Cached {
    AttentionShape s; // strides filled in
    Src q, k, v, sinks;
    const std::int32_t* positions;
    Dst o, k_cache, v_cache;
};

__global__ void keep_kernel(Cached in) {
    const AttentionShape& s = in.s;
    const std::int64_t i = blockIdx.x, keys = std::int64_t{s.kv_heads} * s.qk_dim,
                       values = std::int64_t{s.kv_heads} * s.v_dim, at = in.positions[i];
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    copy_row(in.k, i * s.k_stride + s.k_offset, in.k_cache, at * keys, keys, thread, threads);
    copy_row(in.v, i * s.v_stride + s.v_offset, in.v_cache, at * values, values, thread, threads);
}

// `columns`: those that each lane of a warp has of a head.
template <int columns>
__global__ void __launch_bounds__(warps* warp_size) attend_kernel(Cached in) {
    const AttentionShape& s = in.s;
    const std::int64_t i = blockIdx.x, h = blockIdx.y, key_head = h / (s.heads / s.kv_heads);
    const std::int64_t keys = std::int64_t{s.kv_heads} * s.qk_dim, values = std::int64_t{s.kv_heads} * s.v_dim;
    const int lane = static_cast<int>(threadIdx.x) % warp_size, warp = static_cast<int>(threadIdx.x) / warp_size;
    const Src k = read_back(in.k_cache), v = read_back(in.v_cache);
    float query[columns], out[columns] = {};
#pragma unroll
    for (int c = 0; c < columns; ++c) {
        const int at = lane + c * warp_size;
        query[c] = at < s.qk_dim
                       ? load(in.q, i * s.q_stride + s.q_offset + h * s.qk_dim + at) * static_cast<float>(s.scale)
                       : 0.0f;
    }
    const std::int64_t end = std::int64_t{in.positions[i]} + 1,
                       in_window = s.window > 0 && end > s.window ? end - s.window : 0,
                       in_chunk = s.chunk > 0 ? (end - 1) / s.chunk * s.chunk : 0,
                       from = in_window > in_chunk ? in_window : in_chunk;
    float most = -INFINITY, sum = 0.0f;
    for (std::int64_t j = from + warp; j < end; j += warps) {
        float dot = 0.0f;
#pragma unroll
        for (int c = 0; c < columns; ++c) {
            const int at = lane + c * warp_size;
            if (at < s.qk_dim) dot += query[c] * load(k, j * keys + key_head * s.qk_dim + at);
        }
        dot = warp_sum(dot);
        const float best = fmaxf(most, dot), factor = most == -INFINITY ? 0.0f : expf(most - best),
                    p = expf(dot - best);
        sum = sum * factor + p;
        most = best;
#pragma unroll
        for (int c = 0; c < columns; ++c) {
            const int at = lane + c * warp_size;
            if (at < s.v_dim) out[c] = out[c] * factor + p * load(v, j * values + key_head * s.v_dim + at);
        }
    }
    __shared__ float all_most[warps], all_sum[warps], all_out[warps][columns * warp_size];
    if (lane == 0) {
        all_most[warp] = most;
        all_sum[warp] = sum;
    }
#pragma unroll
    for (int c = 0; c < columns; ++c) all_out[warp][lane + c * warp_size] = out[c];
    __syncthreads();
    const float sink = in.sinks.data != nullptr ? load(in.sinks, h) : -INFINITY;
    float best = sink, total = 0.0f;
    for (int w = 0; w < warps; ++w) best = fmaxf(best, all_most[w]);
    for (int w = 0; w < warps; ++w) total += all_sum[w] * expf(all_most[w] - best); // Without a key: 0 * exp(-inf).
    total += expf(sink - best);
    for (int at = static_cast<int>(threadIdx.x); at < s.v_dim; at += warps * warp_size) {
        float value = 0.0f;
        for (int w = 0; w < warps; ++w) value += all_out[w][at] * expf(all_most[w] - best);
        store(in.o, (i * s.heads + h) * s.v_dim + at, value / total);
    }
}

void attention_cached(const AttentionShape& shape, Src q, Src k, Src v, const std::int32_t* positions, Src sinks, Dst o,
                      Dst k_cache, Dst v_cache, void* stream) {
    if (shape.seq_q <= 0 || shape.heads <= 0) return;
    require(shape.qk_dim <= widest, "the width of an attention head", shape.qk_dim, widest);
    require(shape.v_dim <= widest, "the width of an attention head", shape.v_dim, widest);
    Cached in{shape, q, k, v, sinks, positions, o, k_cache, v_cache};
    if (in.s.q_stride == 0) in.s.q_stride = std::int64_t{shape.heads} * shape.qk_dim;
    if (in.s.k_stride == 0) in.s.k_stride = std::int64_t{shape.kv_heads} * shape.qk_dim;
    if (in.s.v_stride == 0) in.s.v_stride = std::int64_t{shape.kv_heads} * shape.v_dim;
    const auto rows = static_cast<unsigned>(shape.seq_q);
    keep_kernel<<<rows, warps * warp_size, 0, stream_of(stream)>>>(in);
    CUDA_CHECK(cudaGetLastError());
    const dim3 grid(rows, static_cast<unsigned>(shape.heads));
    if (shape.qk_dim <= widest / 2 && shape.v_dim <= widest / 2) {
        attend_kernel<widest / 2 / warp_size><<<grid, warps * warp_size, 0, stream_of(stream)>>>(in);
    } else {
        attend_kernel<widest / warp_size><<<grid, warps * warp_size, 0, stream_of(stream)>>>(in);
    }
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_attention_cached(Kernels& table) { table.attention_cached = attention_cached; }

} // namespace moe::cuda
