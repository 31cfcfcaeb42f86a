// The row passes around an ordered backward: what it needs of each query, and dq from its sums.
#pragma once

#include "kernels/cuda/attention/attention_ordered.cuh"

namespace moe::cuda::tensor_attention {

inline constexpr int row_threads = 256;
struct RowPass {
    const __nv_bfloat16 *dout, *o;
    const float* lse;
    std::int64_t lse_head;
    int rows; // of a head, in whole tiles
    float *lse2, *along;
};

// lse to the base 2 and dout . o of every query; infinity, of which weights are zero, behind the last one. Eight
// columns are a thread's.
template <int v_width>
__global__ void rows_kernel(AttentionSizes z, RowPass r) {
    constexpr int lanes = v_width / 8;
    const AttentionShape& s = z.s;
    const std::int64_t of_row = std::int64_t{s.batch} * s.heads,
                       i = (std::int64_t{blockIdx.x} * row_threads + threadIdx.x) / lanes;
    const std::int64_t row = i / of_row, b = i % of_row / s.heads, h = i % s.heads;
    if (row >= r.rows) return; // whole warps: rows are of whole tiles
    const int lane = static_cast<int>(threadIdx.x) % lanes;
    float sum = 0.0f;
    if (row < s.seq_q) {
        const std::int64_t at = (row * of_row + i % of_row) * v_width + lane * 8;
        const int4 eight = *reinterpret_cast<const int4*>(r.dout + at),
                   others = *reinterpret_cast<const int4*>(r.o + at);
        const auto *x = reinterpret_cast<const __nv_bfloat162*>(&eight),
                   *y = reinterpret_cast<const __nv_bfloat162*>(&others);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 one = __bfloat1622float2(x[j]), other = __bfloat1622float2(y[j]);
            sum += one.x * other.x + one.y * other.y;
        }
    }
#pragma unroll
    for (int mask = lanes / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(all_lanes, sum, mask);
    if (lane != 0) return;
    const float lse = row < s.seq_q ? r.lse[h * r.lse_head + row * s.batch + b] : -INFINITY;
    const std::int64_t to = (b * s.heads + h) * r.rows + row;
    r.lse2[to] = lse == -INFINITY ? INFINITY : lse * log2_e;
    r.along[to] = sum;
}

// dq from the sums of a tile of queries, through shared memory, so that rows are written whole.
template <int qk_width>
__global__ void round_kernel(AttentionShape s, int tiles, const float4* sums, __nv_bfloat16* dq, std::int64_t stride) {
    constexpr int queries = queries_of_tile<qk_width>, pitch = qk_width + 8, of_thread = qk_width * queries / 8 / 128;
    __shared__ __align__(16) __nv_bfloat16 tile[queries * pitch];
    const std::int64_t h = blockIdx.y, b = blockIdx.z, query = std::int64_t{blockIdx.x} * queries;
    const float4* from = sums + ((b * s.heads + h) * tiles + blockIdx.x) * (queries * qk_width / 4);
    const int half = static_cast<int>(threadIdx.x) / 128, thread = static_cast<int>(threadIdx.x) % 128;
    const Place place;
    const auto scale = static_cast<float>(s.scale);
#pragma unroll
    for (int j = 0; j < of_thread; ++j) {
        const float4 x = __ldcs(from + (half * of_thread + j) * 128 + thread);
        const int row = place.row + (queries == 128 ? half * 64 : 0);
        const int first = queries == 128 ? 8 * j : j < 8 ? half * 64 + 8 * j : 128 + half * 32 + 8 * (j - 8);
        __nv_bfloat16* to = tile + row * pitch + first + place.column;
        *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(x.x * scale, x.y * scale);
        *reinterpret_cast<__nv_bfloat162*>(to + 8 * pitch) = __floats2bfloat162_rn(x.z * scale, x.w * scale);
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < queries * qk_width / 8; i += row_threads) {
        const int row = i / (qk_width / 8), column = i % (qk_width / 8) * 8;
        if (query + row >= s.seq_q) break;
        *reinterpret_cast<int4*>(dq + ((query + row) * s.batch + b) * stride + h * qk_width + column) =
            *reinterpret_cast<const int4*>(tile + row * pitch + column);
    }
}

} // namespace moe::cuda::tensor_attention
