// What the gradients of Mamba-2 on the tensor cores share: sums over a block's warps, results, shared memory.
#pragma once

#include "kernels/cuda/state/ssd_tensor.cuh"

namespace moe::cuda::ssd {

// Sums of a block's heads that all threads share, a place for each of `of` warps.
template <int of>
__device__ void put_sum(float* sums, int h, float x) {
    x = warp_sum(x);
    if (threadIdx.x % warp_size == 0) sums[h * of + static_cast<int>(threadIdx.x) / warp_size] = x;
}
template <int of>
__device__ float all_warps(const float* sums, int h) {
    float x = 0.0f;
#pragma unroll
    for (int w = 0; w < of; ++w) x += sums[h * of + w];
    return x;
}

// A warp's rows of a group's gradients of queries (which 0) or keys (1), columns from `first` on: as they are, or a
// block's part of the sums.
template <int blocks>
__device__ void write_rows(const TensorScan& r, const Share& own, const Place& z, int which, int first, Dst dc,
                           const float (&sum)[blocks][2][4]) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size, row = rows_of_warp() * 16 + lane / 4;
    float* const part =
        r.partials + (((std::int64_t{own.part} * r.s.batch + own.b) * r.s.key_heads + own.group) * r.chunks * 2 +
                      own.chunk * 2 + which) *
                         span * r.s.key_dim;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int i = row + half * 8;
        if (i >= z.n) continue;
        const std::int64_t row_of_c = which == 0 ? z.q(i) : z.k(i);
#pragma unroll
        for (int c = 0; c < blocks * 2; ++c) {
            const int column = first + c * 8 + lane % 4 * 2;
            if (column >= r.s.key_dim) continue;
            const float(&two)[4] = sum[c / 2][c % 2];
            if (r.parts > 1)
                *reinterpret_cast<float2*>(part + i * r.s.key_dim + column) = {two[half * 2], two[half * 2 + 1]};
            else
                static_cast<unsigned*>(dc.data)[(row_of_c + column) / 2] = both(two[half * 2], two[half * 2 + 1]);
        }
    }
}

// Shared memory of both kernels: what the heads share | stages of a head's values, gradients and so many rows of its
// state | steps | sums.
template <int shared, int state_rows, int DV>
struct Parts {
    using Values = Tile<DV>;
    static constexpr int values = Values::bytes(span), stage = 2 * values + Values::bytes(state_rows);
    static constexpr int stages = shared + 2 * stage <= 202 * 1024 ? 2 : 1;
    static constexpr int steps_at = shared + stages * stage;
    __host__ __device__ static int sums_at(int heads) { return steps_at + Steps::bytes(heads); }
    __host__ static int bytes(int heads, int floats) { return sums_at(heads) + floats * 4; }
};

__host__ __device__ inline int query_floats(int heads) { return 2 * heads * pairs + 2 * span; }
__host__ __device__ inline int key_floats(int heads) { return 4 * heads * pairs + (pairs + 4) * span; }

// Gradients of queries, then of keys and values, with what each adds to those of steps.
void run_tensor_queries(const TensorScan& scan, Dst dc, cudaStream_t stream);
void run_tensor_keys(const TensorScan& scan, Dst dc, cudaStream_t stream);

} // namespace moe::cuda::ssd
