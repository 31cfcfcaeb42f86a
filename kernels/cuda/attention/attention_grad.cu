// Attention backward in three kernels that share nothing but the inputs: dk and dv by blocks of keys, dq by blocks of
// queries, and the sinks.
//
// Each output is summed by one block in a fixed order: no atomics and no scratch, for one third more arithmetic, since
// the probabilities are computed for either side.
#include "kernels/cuda/attention/attention.cuh"
#include "kernels/cuda/attention/attention_wide.hpp"
#include "kernels/cuda/families.hpp"

namespace moe::cuda {
namespace {

constexpr int short_columns = 2, short_block = short_columns * grid_side; // rows of the side that is gone over
constexpr int sink_threads = 256;

struct Operands {
    Src dout, q, k, v, o;
    const float* lse;
    Dst dq, dk, dv;
};

template <int qk_columns, int v_columns>
struct Shared { // shared memory for long_block rows of one side and short_block rows of the other
    Block<qk_columns * grid_side> qk_long, qk_short;
    Block<v_columns * grid_side> v_long, v_short;
    Block<short_block> probs, dlogits;
    float* lse;   // lse of the queries in the block
    float* along; // dout . o of these queries

    static constexpr int floats =
        (long_block + short_block) * (Block<qk_columns * grid_side>::pitch + Block<v_columns * grid_side>::pitch) +
        2 * long_block * Block<short_block>::pitch + 2 * long_block;

    __device__ explicit Shared(float* at) {
        qk_long.data = at;
        qk_short.data = qk_long[long_block];
        v_long.data = qk_short[short_block];
        v_short.data = v_long[long_block];
        probs.data = v_short[short_block];
        dlogits.data = probs[long_block];
        lse = dlogits[long_block];
        along = lse + long_block;
    }
};

// lse and dout . o of `rows` queries from i0 on, a half warp per query; dout is in shared memory.
template <int width>
__device__ void fill_queries(const AttentionSizes& z, const Operands& in, const Block<width>& dout, std::int64_t b,
                             std::int64_t h, std::int64_t i0, int rows, float* lse, float* along) {
    const int lane = static_cast<int>(threadIdx.x) % grid_side;
    const HeadRows head = z.o(b, h);
    for (int r = static_cast<int>(threadIdx.x) / grid_side; r < rows; r += attention_threads / grid_side) {
        const bool inside = i0 + r < z.s.seq_q;
        float sum = 0.0f;
        for (int c = lane; inside && c < z.s.v_dim; c += grid_side) {
            sum += dout[r][c] * load(in.o, head.start + (i0 + r) * head.step + c);
        }
        sum = side_sum(sum);
        if (lane == 0) {
            along[r] = sum;
            lse[r] = inside ? in.lse[z.lse(b, h, i0 + r)] : 0.0f;
        }
    }
}

// One key block of one key head against all queries that see it, of all query heads that share it.
template <int qk_columns, int v_columns>
__global__ void __launch_bounds__(attention_threads) key_grad_kernel(AttentionSizes z, Operands in) {
    extern __shared__ float shared[];
    const Shared<qk_columns, v_columns> m(shared); // The long side holds keys, the short one queries.
    const AttentionShape& s = z.s;
    const std::int64_t j0 = std::int64_t{blockIdx.x} * long_block, key_head = blockIdx.y, b = blockIdx.z;
    const int row = static_cast<int>(threadIdx.x) / grid_side * rows_per_thread;
    const int col = static_cast<int>(threadIdx.x) % grid_side;
    m.qk_long.fill(in.k, z.k(b, key_head), j0, long_block, s.seq_k, s.qk_dim, 1.0f);
    m.v_long.fill(in.v, z.v(b, key_head), j0, long_block, s.seq_k, s.v_dim, 1.0f);
    // Query i sees keys up to i + shift, and with a window those above i + shift - window. The mask decides which
    // queries of a spread sequence see a block of keys.
    const std::int64_t shift = s.seq_k - s.seq_q, share = s.heads / s.kv_heads;
    const std::int64_t begin = s.causal && !s.spread && j0 - shift > 0 ? j0 - shift : 0;
    const std::int64_t beyond = j0 + long_block - 1 + s.window - shift;
    const std::int64_t end = s.window > 0 && !s.spread && beyond < s.seq_q ? beyond : s.seq_q;
    float dk[rows_per_thread][qk_columns] = {}, dv[rows_per_thread][v_columns] = {};
    for (std::int64_t h = key_head * share; h < (key_head + 1) * share; ++h) {
        for (std::int64_t i0 = begin; i0 < end; i0 += short_block) {
            // Documents that begin behind these keys see none of them, nor do those that follow.
            if (s.document_start != nullptr && z.first(b, i0) >= j0 + long_block) break;
            __syncthreads(); // The previous queries have been read.
            m.qk_short.fill(in.q, z.q(b, h), i0, short_block, s.seq_q, s.qk_dim, static_cast<float>(s.scale));
            m.v_short.fill(in.dout, z.o(b, h), i0, short_block, s.seq_q, s.v_dim, 1.0f);
            __syncthreads();
            fill_queries(z, in, m.v_short, b, h, i0, short_block, m.lse, m.along);
            __syncthreads();
            float logit[rows_per_thread][short_columns], dprob[rows_per_thread][short_columns];
            dot_rows(m.qk_long, m.qk_short, row, col, s.qk_dim, logit);
            dot_rows(m.v_long, m.v_short, row, col, s.v_dim, dprob);
#pragma unroll
            for (int i = 0; i < rows_per_thread; ++i) {
#pragma unroll
                for (int j = 0; j < short_columns; ++j) {
                    const int query = col + j * grid_side;
                    const bool sees = z.sees(b, i0 + query, j0 + row + i);
                    const float p = sees ? expf(logit[i][j] - m.lse[query]) : 0.0f;
                    m.probs[row + i][query] = p;
                    m.dlogits[row + i][query] = p * (dprob[i][j] - m.along[query]);
                }
            }
            __syncwarp(); // The half warp that wrote a row reads it.
            add_rows(m.probs, m.v_short, row, col, short_block, dv);
            add_rows(m.dlogits, m.qk_short, row, col, short_block, dk); // q carries the scale.
        }
    }
    write_rows(in.dk, z.k(b, key_head), j0 + row, s.seq_k, col, s.qk_dim, 1.0f, dk);
    write_rows(in.dv, z.v(b, key_head), j0 + row, s.seq_k, col, s.v_dim, 1.0f, dv);
}

// One query block of one head against all keys that it sees.
template <int qk_columns, int v_columns>
__global__ void __launch_bounds__(attention_threads) query_grad_kernel(AttentionSizes z, Operands in) {
    extern __shared__ float shared[];
    const Shared<qk_columns, v_columns> m(shared); // The long side holds queries, the short one keys.
    const AttentionShape& s = z.s;
    const std::int64_t i0 = std::int64_t{blockIdx.x} * long_block, h = blockIdx.y, b = blockIdx.z;
    const std::int64_t key_head = h / (s.heads / s.kv_heads);
    const int row = static_cast<int>(threadIdx.x) / grid_side * rows_per_thread;
    const int col = static_cast<int>(threadIdx.x) % grid_side;
    const auto scale = static_cast<float>(s.scale);
    m.qk_long.fill(in.q, z.q(b, h), i0, long_block, s.seq_q, s.qk_dim, scale);
    m.v_long.fill(in.dout, z.o(b, h), i0, long_block, s.seq_q, s.v_dim, 1.0f);
    __syncthreads();
    fill_queries(z, in, m.v_long, b, h, i0, long_block, m.lse, m.along);
    float dq[rows_per_thread][qk_columns] = {};
    const std::int64_t last_query = (i0 + long_block < s.seq_q ? i0 + long_block : s.seq_q) - 1;
    const std::int64_t end = z.last(last_query);
    for (std::int64_t j0 = z.first(b, i0); j0 < end; j0 += short_block) {
        __syncthreads(); // The previous keys have been read; the first time, lse and along are there.
        m.qk_short.fill(in.k, z.k(b, key_head), j0, short_block, s.seq_k, s.qk_dim, 1.0f);
        m.v_short.fill(in.v, z.v(b, key_head), j0, short_block, s.seq_k, s.v_dim, 1.0f);
        __syncthreads();
        float logit[rows_per_thread][short_columns], dprob[rows_per_thread][short_columns];
        dot_rows(m.qk_long, m.qk_short, row, col, s.qk_dim, logit);
        dot_rows(m.v_long, m.v_short, row, col, s.v_dim, dprob);
#pragma unroll
        for (int i = 0; i < rows_per_thread; ++i) {
#pragma unroll
            for (int j = 0; j < short_columns; ++j) {
                const int key = col + j * grid_side;
                const float p = z.sees(b, i0 + row + i, j0 + key) ? expf(logit[i][j] - m.lse[row + i]) : 0.0f;
                m.dlogits[row + i][key] = p * (dprob[i][j] - m.along[row + i]);
            }
        }
        __syncwarp();
        add_rows(m.dlogits, m.qk_short, row, col, short_block, dq);
    }
    write_rows(in.dq, z.q(b, h), i0 + row, s.seq_q, col, s.qk_dim, scale, dq, s.merge);
}

// dsinks[h] -= sum over queries of exp(sink - lse) dout . o, one block per head.
__global__ void __launch_bounds__(sink_threads)
    sink_grad_kernel(AttentionShape s, Src dout, Src o, const float* lse, Src sinks, float* dsinks) {
    const std::int64_t h = blockIdx.x, rows = s.seq_q * s.batch;
    const float sink = load(sinks, h);
    const int lane = static_cast<int>(threadIdx.x % warp_size), warps = sink_threads / warp_size;
    float sum = 0.0f;
    for (std::int64_t r = threadIdx.x / warp_size; r < rows; r += warps) {
        const std::int64_t at = r * s.heads * s.v_dim + h * s.v_dim;
        const float weight = expf(sink - lse[h * rows + r]);
        for (int c = lane; c < s.v_dim; c += warp_size) sum += weight * load(dout, at + c) * load(o, at + c);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) dsinks[h] -= sum;
}

void attention_grad(const AttentionShape& s, Src dout, Src q, Src k, Src v, Src o, const float* lse, Src sinks, Dst dq,
                    Dst dk, Dst dv, float* dsinks, void* stream) {
    if (s.seq_q <= 0 || s.seq_k <= 0 || s.batch <= 0 || s.heads <= 0) return;
    const AttentionSizes sizes(s);
    const Operands in{dout, q, k, v, o, lse, dq, dk, dv};
    if (is_wide(s)) {
        wide_attention_grad(s, dout, q, k, v, o, lse, dq, dk, dv, stream);
        if (sinks.data != nullptr) attention_sink_grad(s, dout, o, lse, sinks, dsinks, stream);
        return;
    }
    for_head_dims(s, [&]<int qk_columns, int v_columns>() {
        constexpr std::size_t bytes = Shared<qk_columns, v_columns>::floats * sizeof(float);
        const auto batch = static_cast<unsigned>(s.batch);
        const dim3 keys(blocks_for(s.seq_k, long_block), static_cast<unsigned>(s.kv_heads), batch);
        const dim3 queries(blocks_for(s.seq_q, long_block), static_cast<unsigned>(s.heads), batch);
        launch_shared(key_grad_kernel<qk_columns, v_columns>, keys, bytes, stream, sizes, in);
        launch_shared(query_grad_kernel<qk_columns, v_columns>, queries, bytes, stream, sizes, in);
    });
    if (sinks.data != nullptr) attention_sink_grad(s, dout, o, lse, sinks, dsinks, stream);
}

} // namespace

void attention_sink_grad(const AttentionShape& s, Src dout, Src o, const float* lse, Src sinks, float* dsinks,
                         void* stream) {
    sink_grad_kernel<<<static_cast<unsigned>(s.heads), sink_threads, 0, stream_of(stream)>>>(s, dout, o, lse, sinks,
                                                                                             dsinks);
    CUDA_CHECK(cudaGetLastError());
}

void add_attention_grad(Kernels& table) { table.attention_grad = attention_grad; }

} // namespace moe::cuda
