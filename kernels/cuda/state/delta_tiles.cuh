// What the kernels of a gated delta rule share: a chunk's rows and gates in shared memory, products and triangular
// systems of them.
#pragma once

#include "kernels/cuda/device.cuh"

namespace moe::cuda::delta {

inline constexpr int threads = 256, rows = static_cast<int>(state_chunk), widest = 128; // columns of a head at most

__host__ __device__ inline int padded(int columns) { return (columns + 3) / 4 * 4; }
// Elements from row to row in shared memory: rows of 16 bytes, apart in their banks.
__host__ __device__ inline int stride_of(int columns) { return padded(columns) + 4; }

// The operands of a call, and where the shared memory of each chunk and value head lies in `work`.
struct Rule {
    StateShape s;
    std::int64_t seq, keys, convolved, gates, projected, values, chunks, each;
    int share; // value heads of a key head
    Src c, p, a_log, dt_bias;
    float* work;
    bool grad;

    __host__ Rule(const StateShape& shape, Src c_, Src p_, Src a_log_, Src dt_bias_, float* memory, bool gradients)
        : s(shape),
          seq(s.seq()),
          keys(s.keys()),
          convolved(s.convolved()),
          gates(s.gates()),
          projected(s.projected()),
          values(s.values()),
          chunks(s.chunks()),
          each(s.work(gradients) / (s.batch * s.value_heads * s.chunks())),
          share(s.value_heads / s.key_heads),
          c(c_),
          p(p_),
          a_log(a_log_),
          dt_bias(dt_bias_),
          work(memory),
          grad(gradients) {}
};

// A chunk of a value head: where its operands lie.
struct Place {
    const Rule& r;
    int b, h;
    std::int64_t chunk, at;
    int n; // positions

    __device__ Place(const Rule& rule, int b_, int h_, std::int64_t chunk_)
        : r(rule), b(b_), h(h_), chunk(chunk_), at(chunk_ * rows) {
        n = static_cast<int>(r.seq - at < rows ? r.seq - at : rows);
    }
    __device__ std::int64_t row(int i) const { return (at + i) * r.s.batch + b; }
    __device__ std::int64_t q(int i) const { return row(i) * r.convolved + (h / r.share) * r.s.key_dim; }
    __device__ std::int64_t k(int i) const { return q(i) + r.keys; }
    __device__ std::int64_t v(int i) const { return row(i) * r.convolved + 2 * r.keys + h * r.s.value_dim; }
    __device__ std::int64_t o(int i) const { return row(i) * r.values + h * r.s.value_dim; }
    __device__ std::int64_t beta(int i) const { return row(i) * r.projected + r.gates + h; }
    __device__ std::int64_t decay(int i) const { return beta(i) + r.s.value_heads; }
    // Elements from one position's row to the next one's: products of two ints, which one instruction computes.
    __device__ int step() const { return static_cast<int>(r.s.batch * r.convolved); }
    __device__ int step_of_o() const { return static_cast<int>(r.s.batch * r.values); }
    __device__ int start(int i) const { return r.s.document_start != nullptr ? r.s.document_start[row(i)] : 0; }
    __device__ int weight() const { return r.s.part * r.s.value_heads + h; }

    // Matrices in `work`: two sums of gates, scores [rows, rows], W, U or V' and, for gradients, those of V', queries,
    // keys, and the states before and behind the chunk.
    __device__ float* begin() const { return r.work + ((b * r.s.value_heads + h) * r.chunks + chunk) * r.each; }
    __device__ float* sums() const { return begin(); }
    __device__ float* scores() const { return begin() + rows * rows; }
    __device__ float* w() const { return begin() + 2 * rows * rows; }
    __device__ float* fresh() const { return w() + rows * r.s.key_dim; }
    __device__ float* dfresh() const { return fresh() + rows * r.s.value_dim; }
    __device__ float* dq() const { return dfresh() + rows * r.s.value_dim; }
    __device__ float* dk() const { return dq() + rows * r.s.key_dim; }
    __device__ float* state() const { return dk() + rows * r.s.key_dim; }
    __device__ float* dstate() const { return state() + r.s.key_dim * r.s.value_dim; }
};

// The gates of a chunk's positions, in shared memory: see kernels/cpu/delta_rule.cpp.
struct alignas(16) Gates {
    float beta[rows], g[rows], sum[rows], e[rows], f[rows];
    int first[rows]; // in the chunk, from where on a position's document lies
    float carried;
};

// A position's gates; start: its document's first position less the chunk's.
struct Gate {
    float beta, g;
    long long start;
};

// Called by a warp, which fills in what read(i) finds of n positions.
template <class Read>
__device__ void fill_gates_by_warp(int n, Gates& out, Read read) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    float total = 0.0f;
    for (int i = lane; i < rows; i += warp_size) {
        const bool in = i < n;
        const Gate gate = in ? read(i) : Gate{0.0f, 0.0f, 0};
        float sum = gate.g;
        for (int offset = 1; offset < warp_size; offset *= 2) {
            const float left = __shfl_up_sync(all_lanes, sum, offset);
            if (lane >= offset) sum += left;
        }
        out.beta[i] = gate.beta;
        out.g[i] = gate.g;
        out.sum[i] = total + sum;
        total += __shfl_sync(all_lanes, sum, warp_size - 1);
        out.first[i] = gate.start > 0 ? static_cast<int>(gate.start) : 0;
        out.e[i] = in && gate.start < 0 ? expf(out.sum[i]) : 0.0f;
    }
    __syncwarp();
    for (int i = lane; i < rows; i += warp_size)
        out.f[i] = i < n && i >= out.first[n - 1] ? expf(out.sum[n - 1] - out.sum[i]) : 0.0f;
    if (lane == 0) out.carried = out.e[n - 1];
}

// Called by all threads of a block; one warp fills in, and all see it.
template <class Read>
__device__ void fill_gates(int n, Gates& out, Read read) {
    if (threadIdx.x < warp_size) fill_gates_by_warp(n, out, read);
    __syncthreads();
}

__device__ inline void read_gates_by_warp(const Place& z, Gates& out) {
    const float rate = expf(load(z.r.a_log, z.weight())), bias = load(z.r.dt_bias, z.weight());
    fill_gates_by_warp(z.n, out, [&](int i) {
        const float step = load(z.r.p, z.decay(i)) + bias;
        return Gate{1.0f / (1.0f + expf(-load(z.r.p, z.beta(i)))), -rate * (step > 20.0f ? step : log1pf(expf(step))),
                    z.start(i) - z.at};
    });
}
__device__ inline void read_gates(const Place& z, Gates& out) {
    if (threadIdx.x < warp_size) read_gates_by_warp(z, out);
    __syncthreads();
}

// D_ij of the formulas.
__device__ inline float between(const Gates& g, int i, int j) {
    return j <= i && j >= g.first[i] ? expf(g.sum[i] - g.sum[j]) : 0.0f;
}

// m[rows, columns] of a chunk from rows that `at` finds, zeros behind them; all threads take part, none waits.
template <class At>
__device__ void fetch(float* m, Src x, int columns, int n, At at) {
    const int stride = stride_of(columns), wide = padded(columns);
    for (int item = static_cast<int>(threadIdx.x); item < rows * wide; item += threads) {
        const int i = item / wide, j = item % wide;
        m[i * stride + j] = i < n && j < columns ? load(x, at(i) + j) : 0.0f;
    }
}

// The same of a matrix [count, columns] in `work`.
__device__ inline void fetch_work(float* m, const float* x, int columns, int count) {
    const int stride = stride_of(columns), wide = padded(columns), all = padded(count);
    for (int item = static_cast<int>(threadIdx.x); item < all * wide; item += threads) {
        const int i = item / wide, j = item % wide;
        m[i * stride + j] = i < count && j < columns ? x[i * columns + j] : 0.0f;
    }
}

// Rows of length `scale`; a warp for each, after all have been fetched. inverse[i]: what row i was multiplied by.
__device__ inline void to_units(float* m, int columns, float scale, float* inverse = nullptr) {
    const int lane = static_cast<int>(threadIdx.x % warp_size);
    for (int i = static_cast<int>(threadIdx.x) / warp_size; i < rows; i += threads / warp_size) {
        float* row = m + i * stride_of(columns);
        float squares = 0.0f;
        for (int j = lane; j < columns; j += warp_size) squares += row[j] * row[j];
        const float factor = rsqrtf(warp_sum(squares) + 1e-6f) * scale;
        for (int j = lane; j < columns; j += warp_size) row[j] *= factor;
        if (inverse != nullptr && lane == 0) inverse[i] = factor;
    }
}

// use(i, j, sum over l < k of op(A)(i, l) op(B)(l, j)) for i < m, j < n, all multiples of 4: A is stored [m, k], or
// [k, m] where ta; B [k, n], or [n, k] where tb. The same thread has the same (i, j) whatever m = rows are of.
template <bool ta, bool tb, class Use>
__device__ void product(int m, int n, int k, const float* a, int lda, const float* b, int ldb, Use use) {
    const int across = n / 4;
    for (int tile = static_cast<int>(threadIdx.x); tile < m / 4 * across; tile += threads) {
        const int i = tile / across * 4, j = tile % across * 4;
        float sum[4][4] = {};
        for (int l = 0; l < k; ++l) {
            float x[4], y[4];
            if (ta) {
                const float4 v = *reinterpret_cast<const float4*>(a + l * lda + i);
                x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
            } else {
#pragma unroll
                for (int u = 0; u < 4; ++u) x[u] = a[(i + u) * lda + l];
            }
            if (tb) {
#pragma unroll
                for (int u = 0; u < 4; ++u) y[u] = b[(j + u) * ldb + l];
            } else {
                const float4 v = *reinterpret_cast<const float4*>(b + l * ldb + j);
                y[0] = v.x, y[1] = v.y, y[2] = v.z, y[3] = v.w;
            }
#pragma unroll
            for (int u = 0; u < 4; ++u)
#pragma unroll
                for (int v = 0; v < 4; ++v) sum[u][v] = fmaf(x[u], y[v], sum[u][v]);
        }
#pragma unroll
        for (int u = 0; u < 4; ++u)
#pragma unroll
            for (int v = 0; v < 4; ++v) use(i + u, j + v, sum[u][v]);
    }
}

// x <- (I + A)^-1 x, or (I + A^T)^-1 x, for the strictly lower A [rows, rows]: 16 rows at a time, a thread for each
// column of x and of y.
template <bool transposed>
__device__ void solve(const float* a, int lda, float* x, int x_columns, float* y, int y_columns) {
    constexpr int block = 16;
    const int xw = padded(x_columns), yw = padded(y_columns), t = static_cast<int>(threadIdx.x);
    float* const column = t < xw ? x + t : y + (t - xw);
    const int stride = t < xw ? stride_of(x_columns) : stride_of(y_columns);
    for (int step = 0; step < rows / block; ++step) {
        const int from = transposed ? rows - (step + 1) * block : step * block;
        if (t < xw + yw) {
            float value[block];
            for (int u = 0; u < block; ++u) value[u] = column[(from + u) * stride];
            const int others = transposed ? from + block : 0, end = transposed ? rows : from;
            for (int l = others; l < end; ++l) {
                const float known = column[l * stride];
#pragma unroll
                for (int u = 0; u < block; ++u)
                    value[u] -= (transposed ? a[l * lda + from + u] : a[(from + u) * lda + l]) * known;
            }
#pragma unroll
            for (int step_in = 0; step_in < block; ++step_in) {
                const int u = transposed ? block - 1 - step_in : step_in;
#pragma unroll
                for (int w = 0; w < block; ++w)
                    if (transposed ? w < u : w > u)
                        value[w] -=
                            (transposed ? a[(from + u) * lda + from + w] : a[(from + w) * lda + from + u]) * value[u];
            }
            for (int u = 0; u < block; ++u) column[(from + u) * stride] = value[u];
        }
    }
}

} // namespace moe::cuda::delta
