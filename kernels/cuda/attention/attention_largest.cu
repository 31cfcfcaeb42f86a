// The largest logit of each head beside attention: a pass of its own over queries and keys, whichever kernel attends.
#include "kernels/cuda/attention/attention.cuh"
#include "kernels/cuda/families.hpp"

namespace moe::cuda {
namespace {

constexpr int slice = 64; // elements of a head that lie in shared memory at a time
constexpr int key_columns = 4, block_k = key_columns * grid_side;

// Raises a float that other blocks raise as well. Positive floats are ordered as integers are, negative ones the other
// way round as unsigned integers.
__device__ void raise(float* most, float value) {
    value += 0.0f; // no negative zero
    if (value >= 0.0f)
        atomicMax(reinterpret_cast<int*>(most), __float_as_int(value));
    else
        atomicMin(reinterpret_cast<unsigned*>(most), __float_as_uint(value));
}

__global__ void __launch_bounds__(attention_threads) largest_kernel(AttentionSizes z, Src queries, Src keys) {
    __shared__ float shared[2 * long_block * Block<slice>::pitch];
    static_assert(block_k == long_block);
    const Block<slice> q{shared}, k{q[long_block]};
    const AttentionShape& s = z.s;
    const std::int64_t i0 = std::int64_t{blockIdx.x} * long_block, h = blockIdx.y, b = blockIdx.z;
    const std::int64_t key_head = h / (s.heads / s.kv_heads);
    const int row = static_cast<int>(threadIdx.x) / grid_side * rows_per_thread;
    const int col = static_cast<int>(threadIdx.x) % grid_side;
    const HeadRows query_rows = z.q(b, h), key_rows = z.k(b, key_head);
    const std::int64_t last_query = (i0 + long_block < s.seq_q ? i0 + long_block : s.seq_q) - 1;
    const std::int64_t end = z.last(last_query);
    float most = -INFINITY;
    for (std::int64_t j0 = z.first(b, i0); j0 < end; j0 += block_k) {
        float logits[rows_per_thread][key_columns] = {};
        for (int from = 0; from < s.qk_dim; from += slice) {
            const int width = s.qk_dim - from < slice ? s.qk_dim - from : slice;
            __syncthreads(); // The previous slice has been read.
            q.fill(queries, {query_rows.start + from, query_rows.step}, i0, long_block, s.seq_q, width,
                   static_cast<float>(s.scale));
            k.fill(keys, {key_rows.start + from, key_rows.step}, j0, block_k, s.seq_k, width, 1.0f);
            __syncthreads();
            float part[rows_per_thread][key_columns];
            dot_rows(q, k, row, col, width, part);
#pragma unroll
            for (int i = 0; i < rows_per_thread; ++i) {
#pragma unroll
                for (int j = 0; j < key_columns; ++j) logits[i][j] += part[i][j];
            }
        }
#pragma unroll
        for (int i = 0; i < rows_per_thread; ++i) {
#pragma unroll
            for (int j = 0; j < key_columns; ++j) {
                if (z.sees(b, i0 + row + i, j0 + col + j * grid_side)) most = fmaxf(most, logits[i][j]);
            }
        }
    }
    most = block_max(most);
    if (threadIdx.x == 0 && most != -INFINITY) raise(s.largest + h, most);
}

decltype(Kernels::attention) attends[2]; // what each table held before

template <bool plain>
void attention(const AttentionShape& s, Src q, Src k, Src v, Src sinks, Dst o, float* lse, void* stream) {
    attends[plain](s, q, k, v, sinks, o, lse, stream);
    if (s.largest == nullptr || s.seq_q <= 0 || s.batch <= 0 || s.heads <= 0) return;
    const dim3 grid(blocks_for(s.seq_q, long_block), static_cast<unsigned>(s.heads), static_cast<unsigned>(s.batch));
    largest_kernel<<<grid, attention_threads, 0, stream_of(stream)>>>(AttentionSizes(s), q, k);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_largest_logits(Kernels& table, bool plain) {
    attends[plain ? 1 : 0] = table.attention;
    table.attention = plain ? attention<true> : attention<false>;
}

} // namespace moe::cuda
