// What the kernels of a gated delta rule share: a chunk's rows and gates in shared memory, products and triangular
// systems of them.
//
// Kernels come twice. Operands in BF16, with heads of whole 16 columns, are multiplied by the tensor cores as TF32 with
// FP32 sums, which keeps more than BF16 has, and move in packs of 16 bytes. All others are computed in FP32.
#pragma once

#include "kernels/cuda/delta_products.cuh"

namespace moe::cuda::delta {

// The operands of a call, and where the shared memory of each chunk and value head lies in `work`.
struct Rule {
    DeltaShape s;
    std::int64_t seq, keys, convolved, gates, projected, values, chunks, each;
    int share; // value heads of a key head
    Src c, p, a_log, dt_bias;
    float* work;
    bool grad, tensor; // tensor: the operands are BF16 in whole packs

    __host__ Rule(const DeltaShape& shape, Src c_, Src p_, Src a_log_, Src dt_bias_, float* memory, bool gradients)
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
          grad(gradients),
          tensor(c.type == Type::bf16 && s.key_dim % 16 == 0 && s.value_dim % 16 == 0 &&
                 reinterpret_cast<std::uintptr_t>(c.data) % 16 == 0) {}
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
    __device__ int start(int i) const { return r.s.document_start != nullptr ? r.s.document_start[row(i)] : 0; }
    __device__ int weight() const { return r.s.part * r.s.value_heads + h; }

    // Matrices in `work`: scores [rows, rows], what is kept of rows, W, U or V' and, for gradients, those of V',
    // queries, keys, and the states before and behind the chunk.
    __device__ float* begin() const { return r.work + ((b * r.s.value_heads + h) * r.chunks + chunk) * r.each; }
    __device__ float* scores() const { return begin(); }
    // Two sums of gates, then e and f of the gates, and what makes rows of keys and of queries units, `rows` each.
    __device__ float* sums() const { return begin() + rows * rows; }
    __device__ float* e() const { return sums() + rows; }
    __device__ float* f() const { return e() + rows; }
    __device__ float* unit_keys() const { return f() + rows; }
    __device__ float* unit_queries() const { return unit_keys() + rows; }
    __device__ float* w() const { return begin() + 2 * rows * rows; }
    __device__ float* fresh() const { return w() + rows * r.s.key_dim; }
    __device__ float* dfresh() const { return fresh() + rows * r.s.value_dim; }
    __device__ float* dq() const { return dfresh() + rows * r.s.value_dim; }
    __device__ float* dk() const { return dq() + rows * r.s.key_dim; }
    __device__ float* state() const { return dk() + rows * r.s.key_dim; }
    __device__ float* dstate() const { return state() + r.s.key_dim * r.s.value_dim; }
};

// The gates of a chunk's positions, in shared memory: see kernels/cpu/delta_rule.cpp.
struct Gates {
    float beta[rows], g[rows], sum[rows], e[rows], f[rows];
    int first[rows]; // in the chunk, from where on a position's document lies
    float carried;
};

// Called by all threads of a block; one warp fills them in, and all see them.
__device__ inline void read_gates(const Place& z, Gates& out) {
    const int lane = static_cast<int>(threadIdx.x);
    if (lane < warp_size) {
        const float rate = expf(load(z.r.a_log, z.weight())), bias = load(z.r.dt_bias, z.weight());
        float total = 0.0f;
        for (int i = lane; i < rows; i += warp_size) {
            const bool in = i < z.n;
            const float step = in ? load(z.r.p, z.decay(i)) + bias : 0.0f;
            const float g = in ? -rate * (step > 20.0f ? step : log1pf(expf(step))) : 0.0f;
            float sum = g;
            for (int offset = 1; offset < warp_size; offset *= 2) {
                const float left = __shfl_up_sync(all_lanes, sum, offset);
                if (lane >= offset) sum += left;
            }
            out.beta[i] = in ? 1.0f / (1.0f + expf(-load(z.r.p, z.beta(i)))) : 0.0f;
            out.g[i] = g;
            out.sum[i] = total + sum;
            total += __shfl_sync(all_lanes, sum, warp_size - 1);
            const long long start = in ? z.start(i) - z.at : 0;
            out.first[i] = start > 0 ? static_cast<int>(start) : 0;
            out.e[i] = in && start < 0 ? expf(out.sum[i]) : 0.0f;
        }
        __syncwarp();
        for (int i = lane; i < rows; i += warp_size)
            out.f[i] = i < z.n && i >= out.first[z.n - 1] ? expf(out.sum[z.n - 1] - out.sum[i]) : 0.0f;
        if (lane == 0) out.carried = out.e[z.n - 1];
    }
    __syncthreads();
}

// D_ij of the formulas.
__device__ inline float between(const Gates& g, int i, int j) {
    return j <= i && j >= g.first[i] ? expf(g.sum[i] - g.sum[j]) : 0.0f;
}

// A thread's share of a matrix [rows, columns]: packs of 16 bytes on their way to registers, `most` at most, whose rows
// `at` finds. put(u, i, j, x): columns j to j + 3 of row i, of pack u;
// zeros behind n rows.
template <class T, int most>
class Packs {
public:
    template <class At>
    __device__ void load(const T* x, int columns, int n, At at) {
        const int across = columns / each;
#pragma unroll
        for (int u = 0; u < most; ++u) {
            const int item = static_cast<int>(threadIdx.x) + u * threads, i = item / across;
            value_[u] = i < n && i < rows ? *reinterpret_cast<const uint4*>(x + at(i) + item % across * each)
                                          : uint4{0, 0, 0, 0};
        }
    }
    template <class Put>
    __device__ void put(int columns, int count, Put put) const {
        const int across = columns / each;
#pragma unroll
        for (int u = 0; u < most; ++u) {
            const int item = static_cast<int>(threadIdx.x) + u * threads, i = item / across, j = item % across * each;
            if (i >= count) continue;
            if constexpr (sizeof(T) == 2) {
                put(u, i, j, float4{low(value_[u].x), high(value_[u].x), low(value_[u].y), high(value_[u].y)});
                put(u, i, j + 4, float4{low(value_[u].z), high(value_[u].z), low(value_[u].w), high(value_[u].w)});
            } else {
                put(u, i, j,
                    float4{__uint_as_float(value_[u].x), __uint_as_float(value_[u].y), __uint_as_float(value_[u].z),
                           __uint_as_float(value_[u].w)});
            }
        }
    }

private:
    static constexpr int each = 16 / sizeof(T);
    __device__ static float low(unsigned two) { return __uint_as_float(two << 16); } // BF16 is the upper half of FP32
    __device__ static float high(unsigned two) { return __uint_as_float(two & 0xffff0000u); }
    uint4 value_[most];
};
using Elements = Packs<__nv_bfloat16, rows * widest / 8 / threads>;
using Floats = Packs<float, rows * widest / 4 / threads>;

__device__ inline void put_four(float* to, float4 x) { *reinterpret_cast<float4*>(to) = x; }

// m[rows, columns] of a chunk from rows that `at` finds, zeros behind them; all threads take part, none waits.
template <bool tensor, class At>
__device__ void fetch(float* m, Src x, int columns, int n, At at) {
    const int stride = stride_of(columns), wide = padded(columns);
    if constexpr (tensor) {
        Elements packs;
        packs.load(static_cast<const __nv_bfloat16*>(x.data), columns, n, at);
        packs.put(columns, rows, [&](int, int i, int j, float4 v) { put_four(m + i * stride + j, v); });
    } else {
        for (int item = static_cast<int>(threadIdx.x); item < rows * wide; item += threads) {
            const int i = item / wide, j = item % wide;
            m[i * stride + j] = i < n && j < columns ? load(x, at(i) + j) : 0.0f;
        }
    }
}

// The same of a matrix [count, columns] in `work`.
template <bool tensor>
__device__ void fetch_work(float* m, const float* x, int columns, int count) {
    const int stride = stride_of(columns), wide = padded(columns), all = padded(count);
    if constexpr (tensor) {
#pragma unroll 1
        for (int from = 0; from < count; from += rows) {
            Floats packs;
            packs.load(x + from * columns, columns, count - from, [&](int i) { return i * columns; });
            packs.put(columns, count - from < rows ? count - from : rows,
                      [&](int, int i, int j, float4 v) { put_four(m + (from + i) * stride + j, v); });
        }
    } else {
        for (int item = static_cast<int>(threadIdx.x); item < all * wide; item += threads) {
            const int i = item / wide, j = item % wide;
            m[i * stride + j] = i < count && j < columns ? x[i * columns + j] : 0.0f;
        }
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

inline constexpr int slice = 32; // columns of the state that a block passes on

// What a chunk brings to the passing of states: W, keys, queries, scores, a slice of what is new (V' or the outputs'
// gradient), e and f of the gates. The tensor cores' kernels have the next chunk's on their way while they compute.
template <bool tensor>
class ChunkAhead {
public:
    // Queries that are not asked for are left out, and the scores with them.
    __device__ ChunkAhead(const Rule& rule, bool queries) : r_(rule), queries_(queries) {}

    // `fresh` finds the FP32 matrix [rows, value_dim] in `work` whose columns from `first` are the slice.
    template <class Fresh>
    __device__ void begin(std::int64_t chunk, int first, int columns, Fresh fresh) {
        chunk_ = chunk, first_ = first, columns_ = columns;
        const Place z = place();
        const int dv = r_.s.value_dim;
        news_ = fresh(z) + first;
        if constexpr (tensor) {
            start(z);
            new_.load(news_, columns, z.n, [&](int i) { return i * dv; });
        }
    }
    // The same where the slice is of rows of the outputs, in BF16 or FP32.
    __device__ void begin(std::int64_t chunk, int first, int columns, Src dout) {
        chunk_ = chunk, first_ = first, columns_ = columns;
        const Place z = place();
        dout_ = dout;
        if constexpr (tensor) {
            start(z);
            grad_.load(static_cast<const __nv_bfloat16*>(dout.data) + first, columns, z.n,
                       [&](int i) { return z.o(i); });
        }
    }

    __device__ void put(float* w, float* k, float* q, float* scores, float* fresh, float* e, float* f) const {
        const Place z = place();
        const int dk = r_.s.key_dim, dv = r_.s.value_dim, t = static_cast<int>(threadIdx.x);
        const int ks = stride_of(dk), ss = stride_of(slice), as = stride_of(rows);
        if constexpr (tensor) {
            w_.put(dk, rows, [&](int, int i, int j, float4 x) { put_four(w + i * ks + j, x); });
            put_units(k_, unit_k_, dk, k);
            if (queries_) {
                put_units(q_, unit_q_, dk, q);
                scores_.put(rows, rows, [&](int, int i, int j, float4 x) { put_four(scores + i * as + j, x); });
            }
            const auto put_new = [&](int, int i, int j, float4 x) { put_four(fresh + i * ss + j, x); };
            if (dout_.data != nullptr) {
                grad_.put(columns_, rows, put_new);
            } else {
                new_.put(columns_, rows, put_new);
            }
            if (t < rows) e[t] = e_, f[t] = f_;
        } else {
            fetch_work<false>(w, z.w(), dk, rows);
            fetch<false>(k, r_.c, dk, z.n, [&](int i) { return z.k(i); });
            if (queries_) {
                fetch<false>(q, r_.c, dk, z.n, [&](int i) { return z.q(i); });
                fetch_work<false>(scores, z.scores(), rows, rows);
            }
            for (int item = t; item < rows * slice; item += threads) {
                const int i = item / slice, j = item % slice;
                const bool in = i < z.n && first_ + j < dv;
                fresh[i * ss + j] = !in                     ? 0.0f
                                    : dout_.data != nullptr ? cuda::load(dout_, z.o(i) + first_ + j)
                                                            : news_[i * dv + j];
            }
            if (t < rows) e[t] = z.e()[t], f[t] = z.f()[t];
            __syncthreads();
            scale_rows(k, z.unit_keys(), dk);
            if (queries_) scale_rows(q, z.unit_queries(), dk);
        }
    }

private:
    static constexpr int of_rows = rows * widest / 8 / threads; // packs of elements
    __device__ Place place() const {
        return Place(r_, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), chunk_);
    }
    __device__ void start(const Place& z) {
        const int dk = r_.s.key_dim, t = static_cast<int>(threadIdx.x);
        const auto* c = static_cast<const __nv_bfloat16*>(r_.c.data);
        w_.load(z.w(), dk, rows, [&](int i) { return i * dk; });
        k_.load(c, dk, z.n, [&](int i) { return z.k(i); });
        if (queries_) {
            q_.load(c, dk, z.n, [&](int i) { return z.q(i); });
            scores_.load(z.scores(), rows, rows, [&](int i) { return i * rows; });
        }
#pragma unroll
        for (int u = 0; u < of_rows; ++u) {
            const int i = (t + u * threads) / (dk / 8);
            unit_k_[u] = i < rows ? z.unit_keys()[i] : 0.0f;
            unit_q_[u] = i < rows ? z.unit_queries()[i] : 0.0f;
        }
        if (t < rows) e_ = z.e()[t], f_ = z.f()[t];
    }
    // A thread's packs are of one row each.
    __device__ static void put_units(const Elements& packs, const float (&unit)[of_rows], int columns, float* to) {
        const int stride = stride_of(columns);
        packs.put(columns, rows, [&](int u, int i, int j, float4 x) {
            const float by = unit[u];
            put_four(to + i * stride + j, float4{x.x * by, x.y * by, x.z * by, x.w * by});
        });
    }
    __device__ static void scale_rows(float* m, const float* by, int columns) {
        const int stride = stride_of(columns);
        for (int item = static_cast<int>(threadIdx.x); item < rows * stride; item += threads)
            m[item] *= by[item / stride];
    }

    const Rule& r_;
    const bool queries_;
    std::int64_t chunk_ = 0;
    int first_ = 0, columns_ = 0;
    const float* news_ = nullptr;
    Src dout_{};
    Floats w_;
    Elements k_, q_;
    Packs<float, rows * rows / 4 / threads> scores_;
    Packs<float, rows * slice / 4 / threads> new_;
    Packs<__nv_bfloat16, rows * slice / 8 / threads> grad_;
    float unit_k_[of_rows], unit_q_[of_rows], e_ = 0.0f, f_ = 0.0f;
};

template <class Kernel>
void allow_shared(Kernel* kernel, std::size_t bytes) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
}

} // namespace moe::cuda::delta
