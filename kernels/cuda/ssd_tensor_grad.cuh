// What the gradients of Mamba-2 on the tensor cores share: sums over a block's warps, results, shared memory.
#pragma once

#include "kernels/cuda/ssd_tensor.cuh"

namespace moe::cuda::ssd {

// Sums of a block's heads that all threads share, a place for each warp.
__device__ inline void put_sum(float* sums, int h, float x) {
    x = warp_sum(x);
    if (threadIdx.x % warp_size == 0) sums[h * warps + static_cast<int>(threadIdx.x) / warp_size] = x;
}
__device__ inline float all_warps(const float* sums, int h) {
    float x = 0.0f;
#pragma unroll
    for (int w = 0; w < warps; ++w) x += sums[h * warps + w];
    return x;
}

// A warp's rows of a group's gradients of queries (which 0) or keys (1): as they are, or a block's part of the sums.
template <int DK>
__device__ void write_rows(const TensorScan& r, const Share& own, const Place& z, int which, Dst dc,
                           const float (&sum)[DK / 16][2][4]) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size, row = rows_of_warp() * 16 + lane / 4;
    float* const part =
        r.partials + (((std::int64_t{own.part} * r.s.batch + own.b) * r.s.key_heads + own.group) * r.chunks * 2 +
                      own.chunk * 2 + which) *
                         span * r.s.key_dim;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int i = row + half * 8;
        if (i >= z.n) continue;
#pragma unroll
        for (int c = 0; c < DK / 8; ++c) {
            const int column = c * 8 + lane % 4 * 2;
            if (column >= r.s.key_dim) continue;
            const float(&two)[4] = sum[c / 2][c % 2];
            if (r.parts > 1)
                *reinterpret_cast<float2*>(part + i * r.s.key_dim + column) = {two[half * 2], two[half * 2 + 1]};
            else
                static_cast<unsigned*>(dc.data)[((which == 0 ? z.q(i) : z.k(i)) + column) / 2] =
                    both(two[half * 2], two[half * 2 + 1]);
        }
    }
}

// Shared memory of both kernels: what the heads share | stages of a head's values, gradients and state | steps | sums.
template <int DK, int DV, int shared>
struct Parts {
    using Keys = Tile<DK>;
    using Values = Tile<DV>;
    static constexpr int keys = Keys::bytes(span), values = Values::bytes(span), stage = 2 * values + Values::bytes(DK);
    static constexpr int stages = shared * keys + 2 * stage <= 170 * 1024 ? 2 : 1;
    static constexpr int steps_at = shared * keys + stages * stage;
    __host__ __device__ static int sums_at(int heads) { return steps_at + Steps::bytes(heads); }
    __host__ static int bytes(int heads, int floats) { return sums_at(heads) + floats * 4; }
};

template <int DK, int DV>
using QueryParts = Parts<DK, DV, 1>;
template <int DK, int DV>
using KeyParts = Parts<DK, DV, 2>;
__host__ __device__ inline int query_floats(int heads) { return heads * warps; }
__host__ __device__ inline int key_floats(int heads) { return 2 * heads * warps + 2 * (warps + 1) * span; }

// Gradients of queries, then of keys and values, with what each adds to those of steps.
void run_tensor_queries(const TensorScan& scan, Dst dc, cudaStream_t stream);
void run_tensor_keys(const TensorScan& scan, Dst dc, cudaStream_t stream);

} // namespace moe::cuda::ssd
