// What the kernels of Mamba-2 share: a chunk's rows and steps; products and their shared memory are the delta rule's.
#pragma once

#include "kernels/cuda/state/delta_tiles.cuh"

namespace moe::cuda::ssd {

using delta::between;
using delta::fetch;
using delta::fetch_work;
using delta::Gates;
using delta::padded;
using delta::product;
using delta::rows;
using delta::stride_of;
using delta::threads;

inline constexpr int slab = 64; // rows of a state, or columns of queries and keys, that a block holds at a time

// The operands of a call, and where the shared memory of each chunk lies in `work`: of all heads the states before
// their chunks, of gradients those of the states behind, four numbers of each, and of groups' queries and keys
// gradients.
struct Scan {
    StateShape s;
    int chunk_rows; // positions of a chunk
    std::int64_t seq, keys, convolved, gates, projected, values, chunks, size;
    int share; // heads of a group
    Src c, p, a_log, dt_bias, skip;
    float *states, *dstates, *numbers, *dqs;

    __host__ Scan(const StateShape& shape, Src c_, Src p_, Src a_log_, Src dt_bias_, Src skip_, float* work, bool grad,
                  int chunk_rows_ = rows)
        : s(shape),
          chunk_rows(chunk_rows_),
          seq(s.seq()),
          keys(s.keys()),
          convolved(s.convolved()),
          gates(s.gates()),
          projected(s.projected()),
          values(s.values()),
          chunks(ceil_div(seq, std::int64_t{chunk_rows})),
          size(std::int64_t{s.key_dim} * s.value_dim),
          share(s.value_heads / s.key_heads),
          c(c_),
          p(p_),
          a_log(a_log_),
          dt_bias(dt_bias_),
          skip(skip_),
          states(work),
          dstates(work + all() * size),
          numbers(work + (grad ? 2 : 1) * all() * size),
          dqs(numbers + 4 * all()) {}
    __host__ std::int64_t all() const { return s.batch * s.value_heads * chunks; }
};

// A chunk of a head: where its operands lie.
struct Place {
    const Scan& r;
    int b, h;
    std::int64_t chunk, at;
    int n; // positions

    __device__ Place(const Scan& scan, int b_, int h_, std::int64_t chunk_)
        : r(scan), b(b_), h(h_), chunk(chunk_), at(chunk_ * r.chunk_rows) {
        n = static_cast<int>(r.seq - at < r.chunk_rows ? r.seq - at : r.chunk_rows);
    }
    __device__ std::int64_t row(int i) const { return (at + i) * r.s.batch + b; }
    __device__ std::int64_t q(int i) const { return row(i) * r.convolved + (h / r.share) * r.s.key_dim; }
    __device__ std::int64_t k(int i) const { return q(i) + r.keys; }
    __device__ std::int64_t v(int i) const { return row(i) * r.convolved + 2 * r.keys + h * r.s.value_dim; }
    __device__ std::int64_t o(int i) const { return row(i) * r.values + h * r.s.value_dim; }
    __device__ std::int64_t step(int i) const { return row(i) * r.projected + r.gates + h; }
    __device__ long long start(int i) const {
        return (r.s.document_start != nullptr ? r.s.document_start[row(i)] : 0) - at;
    }
    __device__ int weight() const { return r.s.part * r.s.value_heads + h; }
    __device__ std::int64_t index() const { return (std::int64_t{b} * r.s.value_heads + h) * r.chunks + chunk; }
    __device__ float* state() const { return r.states + index() * r.size; }
    __device__ float* dstate() const { return r.dstates + index() * r.size; }
    // What is carried of the state; sums for a_log, dt_bias and skip.
    __device__ float* numbers() const { return r.numbers + index() * 4; }
    // Of a group, whose first head this is.
    __device__ float* dq() const {
        return r.dqs + ((std::int64_t{b} * r.s.key_heads + h / r.share) * r.chunks + chunk) * 2 * rows * r.s.key_dim;
    }
    __device__ float* dk() const { return dq() + rows * r.s.key_dim; }
};

__device__ inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// The gates of a chunk, whose beta are the widths of steps.
__device__ inline void read_steps(const Place& z, Gates& out) {
    const float rate = expf(load(z.r.a_log, z.weight())), bias = load(z.r.dt_bias, z.weight());
    delta::fill_gates(z.n, out, [&](int i) {
        const float width = fminf(fmaxf(softplus(load(z.r.p, z.step(i)) + bias), z.r.s.step_min), z.r.s.step_max);
        return delta::Gate{width, -rate * width, z.start(i)};
    });
}

// Columns of queries and keys that a slab from `first` on has.
__device__ inline int slab_width(const Scan& r, int first) {
    return r.s.key_dim - first < slab ? r.s.key_dim - first : slab;
}

// out[i] = sum over columns of x(i, j) y(i, j), a warp for each row.
template <class Use>
__device__ void dots(const float* x, const float* y, int stride, int columns, Use use) {
    const int lane = static_cast<int>(threadIdx.x % warp_size);
    for (int i = static_cast<int>(threadIdx.x) / warp_size; i < rows; i += threads / warp_size) {
        float sum = 0.0f;
        for (int j = lane; j < columns; j += warp_size) sum += x[i * stride + j] * y[i * stride + j];
        sum = warp_sum(sum);
        if (lane == 0) use(i, sum);
    }
}

// What a chunk alone leaves in a state, (f k)^T (dt v), or its gradient hands to the state before it, (e q)^T do.
void run_locals(const Scan& scan, Src dout, bool grad, cudaStream_t stream);
// Places what chunks left as the states before each of them; of gradients from the last to the first, behind each.
void run_passes(const Scan& scan, bool grad, cudaStream_t stream);
// Adds what numbers() hold of all chunks to the gradients of the heads' weights.
void run_weights(const Scan& scan, float* da_log, float* ddt_bias, float* dskip, cudaStream_t stream);
// Throws std::runtime_error for heads that are wider than the kernels' shared memory.
void check_shape(const StateShape& shape);

} // namespace moe::cuda::ssd
