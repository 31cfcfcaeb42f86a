// Attention forward: a block of queries goes over the keys it sees with a running softmax.
#include "kernels/cuda/attention/attention.cuh"
#include "kernels/cuda/attention/attention_wide.hpp"
#include "kernels/cuda/families.hpp"

namespace moe::cuda {
namespace {

constexpr int key_columns = 4, block_k = key_columns * grid_side;

struct Operands {
    Src q, k, v, sinks;
    Dst o;
    float* lse;
};

// The running softmax of one thread's four rows; the 16 threads of a row hold the same numbers.
struct Running {
    float max[rows_per_thread], sum[rows_per_thread];

    __device__ explicit Running(float sink) {
#pragma unroll
        for (int i = 0; i < rows_per_thread; ++i) {
            max[i] = sink;
            sum[i] = sink == -INFINITY ? 0.0f : 1.0f;
        }
    }

    // Row i continues a softmax whose sum and maximum are one logit.
    __device__ void resume(int i, float lse) {
        max[i] = lse;
        sum[i] = lse == -INFINITY ? 0.0f : 1.0f;
    }

    // Turns row i's logits, -infinity where masked, into probabilities relative to the new maximum; returns the factor
    // that brings what was summed before to that maximum.
    __device__ float soften(int i, float (&logits)[key_columns]) {
        float best = max[i], added = 0.0f;
#pragma unroll
        for (int j = 0; j < key_columns; ++j) best = fmaxf(best, logits[j]);
        best = side_max(best);
        const float factor = max[i] == -INFINITY ? 0.0f : expf(max[i] - best);
#pragma unroll
        for (int j = 0; j < key_columns; ++j) {
            logits[j] = logits[j] == -INFINITY ? 0.0f : expf(logits[j] - best);
            added += logits[j];
        }
        sum[i] = sum[i] * factor + side_sum(added);
        max[i] = best;
        return factor;
    }
};

template <int qk_columns, int v_columns>
__global__ void __launch_bounds__(attention_threads) attention_kernel(AttentionSizes z, Operands in) {
    extern __shared__ float shared[];
    constexpr int qk_width = qk_columns * grid_side, v_width = v_columns * grid_side;
    const Block<qk_width> q{shared}, k{q[long_block]};
    const Block<v_width> v{k[block_k]};
    const Block<block_k> probs{v[block_k]};
    const AttentionShape& s = z.s;
    const std::int64_t i0 = std::int64_t{blockIdx.x} * long_block, h = blockIdx.y, b = blockIdx.z;
    const std::int64_t key_head = h / (s.heads / s.kv_heads);
    const int row = static_cast<int>(threadIdx.x) / grid_side * rows_per_thread;
    const int col = static_cast<int>(threadIdx.x) % grid_side;
    Running running(in.sinks.data != nullptr ? load(in.sinks, h) : -INFINITY);
    float out[rows_per_thread][v_columns] = {};
    if (s.merge) {
        const HeadRows head = z.o(b, h);
#pragma unroll
        for (int i = 0; i < rows_per_thread; ++i) {
            if (i0 + row + i >= s.seq_q) continue;
            running.resume(i, in.lse[z.lse(b, h, i0 + row + i)]);
#pragma unroll
            for (int c = 0; c < v_columns; ++c) {
                const int at = col + c * grid_side;
                if (at < s.v_dim) out[i][c] = load(read_back(in.o), head.start + (i0 + row + i) * head.step + at);
            }
        }
        __syncwarp(); // The 16 threads of a row have read lse before one of them writes it.
    }
    q.fill(in.q, z.q(b, h), i0, long_block, s.seq_q, s.qk_dim, static_cast<float>(s.scale));
    const std::int64_t last_query = (i0 + long_block < s.seq_q ? i0 + long_block : s.seq_q) - 1;
    const std::int64_t end = z.last(last_query);
    for (std::int64_t j0 = z.first(b, i0); j0 < end; j0 += block_k) {
        __syncthreads(); // The previous keys and values have been read.
        k.fill(in.k, z.k(b, key_head), j0, block_k, s.seq_k, s.qk_dim, 1.0f);
        v.fill(in.v, z.v(b, key_head), j0, block_k, s.seq_k, s.v_dim, 1.0f);
        __syncthreads();
        float logits[rows_per_thread][key_columns];
        dot_rows(q, k, row, col, s.qk_dim, logits);
#pragma unroll
        for (int i = 0; i < rows_per_thread; ++i) {
#pragma unroll
            for (int j = 0; j < key_columns; ++j) {
                if (!z.sees(b, i0 + row + i, j0 + col + j * grid_side)) logits[i][j] = -INFINITY;
            }
            const float factor = running.soften(i, logits[i]);
#pragma unroll
            for (int c = 0; c < v_columns; ++c) out[i][c] *= factor;
#pragma unroll
            for (int j = 0; j < key_columns; ++j) probs[row + i][col + j * grid_side] = logits[i][j];
        }
        __syncwarp(); // A row of probabilities is read by the half warp that wrote it.
        add_rows(probs, v, row, col, block_k, out);
    }
#pragma unroll
    for (int i = 0; i < rows_per_thread; ++i) { // A query that sees nothing yields zeros.
        const float sum = running.sum[i];
#pragma unroll
        for (int c = 0; c < v_columns; ++c) out[i][c] = sum > 0.0f ? out[i][c] / sum : 0.0f;
        if (col == 0 && i0 + row + i < s.seq_q) {
            in.lse[z.lse(b, h, i0 + row + i)] = sum > 0.0f ? running.max[i] + logf(sum) : -INFINITY;
        }
    }
    write_rows(in.o, z.o(b, h), i0 + row, s.seq_q, col, s.v_dim, 1.0f, out);
}

void attention(const AttentionShape& s, Src q, Src k, Src v, Src sinks, Dst o, float* lse, void* stream) {
    if (s.seq_q <= 0 || s.batch <= 0 || s.heads <= 0) return;
    if (is_wide(s)) return wide_attention(s, q, k, v, sinks, o, lse, stream);
    for_head_dims(s, [&]<int qk_columns, int v_columns>() {
        constexpr int floats = (long_block + block_k) * Block<qk_columns * grid_side>::pitch +
                               block_k * Block<v_columns * grid_side>::pitch + long_block * Block<block_k>::pitch;
        const dim3 grid(blocks_for(s.seq_q, long_block), static_cast<unsigned>(s.heads),
                        static_cast<unsigned>(s.batch));
        launch_shared(attention_kernel<qk_columns, v_columns>, grid, floats * sizeof(float), stream, AttentionSizes(s),
                      Operands{q, k, v, sinks, o, lse});
    });
}

} // namespace

void add_attention(Kernels& table) { table.attention = attention; }

} // namespace moe::cuda
