// The gated delta rule forward on the tensor cores: systems of all chunks at once, then states from chunk to chunk.
//
// Floor: 2 (3 dk dv + 64 (dk + dv)) FLOPs for each token and value head at the rate of TF32, or q, k, v and the gates
// in and o out. Formulas: kernels/cpu/delta_rule.cpp.
#include "kernels/cuda/delta_tensor.cuh"

namespace moe::cuda::delta {
namespace {

// W, U and the scores of a chunk, and what is kept of its rows. Shared memory: keys | queries, then values | A | its
// inverse.
__global__ void __launch_bounds__(threads, 2) systems_kernel(Rule r) {
    extern __shared__ __align__(16) float memory[];
    __shared__ Gates g;
    __shared__ float unit_k[rows], unit_q[rows], between_[3 * 256];
    const Place z(r, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), blockIdx.x);
    const int t = static_cast<int>(threadIdx.x);
    float *k = memory, *x = k + rows * wide_stride, *a = x + rows * wide_stride, *inverse = a + rows * square_stride;
    Elements<threads> keys, queries, values;
    keys.load(elements(r.c) + z.k(0), z.n, [&](int i) { return std::int64_t{i} * z.step(); });
    queries.load(elements(r.c) + z.q(0), z.n, [&](int i) { return std::int64_t{i} * z.step(); });
    values.load(elements(r.c) + z.v(0), z.n, [&](int i) { return std::int64_t{i} * z.step(); });
    keys.put(k, wide_stride);
    queries.put(x, wide_stride);
    read_gates(z, g);
    to_units(k, widest, 1.0f, unit_k);
    to_units(x, widest, rsqrtf(static_cast<float>(widest)), unit_q);
    __syncthreads();
    if (t < rows) z.e()[t] = g.e[t], z.f()[t] = g.f[t], z.unit_keys()[t] = unit_k[t], z.unit_queries()[t] = unit_q[t];
    for (int item = t; item < rows * widest / 4; item += threads) {
        float* const at = item / (widest / 4) * wide_stride + item % (widest / 4) * 4 + k;
        four(at) = tf32(four(at));
        four(at + (x - k)) = tf32(four(at + (x - k)));
    }
    __syncthreads();
    const auto within = [&](int i, int j, float4 v) {
        return float4{v.x * between(g, i, j), v.y * between(g, i, j + 1), v.z * between(g, i, j + 2),
                      v.w * between(g, i, j + 3)};
    };
    {
        Sums<rows, rows> scores, system;
        scores.multiply<false, true>(widest, x, wide_stride, k, wide_stride);
        system.multiply<false, true>(widest, k, wide_stride, k, wide_stride);
        scores.each([&](int i, int j, float4& v) { four(z.scores() + i * rows + j) = within(i, j, v); });
        system.each([&](int i, int j, float4& v) {
            const float4 y = times(within(i, j, v), g.beta[i]);
            four(a + i * square_stride + j) = {j < i ? y.x : 0.0f, j + 1 < i ? y.y : 0.0f, j + 2 < i ? y.z : 0.0f,
                                               j + 3 < i ? y.w : 0.0f};
        });
    }
    __syncthreads();
    values.put(x, wide_stride);
    invert(a, inverse, between_);
    for (int item = t; item < rows * rows; item += threads) {
        const int i = item / rows, j = item % rows, at = i * square_stride + j;
        const float y = inverse[at] * g.beta[j];
        a[at] = tf32(y * g.e[j]), inverse[at] = tf32(y);
    }
    __syncthreads();
    Sums<rows, widest> w, u;
    w.multiply<false, false>(rows, a, square_stride, k, wide_stride);
    u.multiply<false, false>(rows, inverse, square_stride, x, wide_stride);
    w.each([&](int i, int j, float4& v) { four(z.w() + i * widest + j) = v; });
    u.each([&](int i, int j, float4& v) { four(z.fresh() + i * widest + j) = v; });
}

// Two halves of a block, of `threads` each: one passes the state on, the other has what nobody waits for.
constexpr int many = 2 * threads;

// What the next chunk brings to the passing of states, on its way while the one before is computed.
struct Ahead {
    using Columns = Elements<many>;
    Packs<float, widest, rows, many> w;
    Columns k, q;
    Packs<float, rows, rows, many> scores;
    Packs<float, slice, rows, many> fresh;
    float unit_k[Columns::most], unit_q[Columns::most], e = 0.0f, f = 0.0f;

    __device__ void load(const Place& z, int first, bool queries) {
        w.load(z.w(), rows, [](int i) { return i * widest; });
        k.load(elements(z.r.c) + z.k(0), z.n, [&](int i) { return std::int64_t{i} * z.step(); });
        fresh.load(z.fresh() + first, z.n, [](int i) { return i * widest; });
        if (queries) {
            q.load(elements(z.r.c) + z.q(0), z.n, [&](int i) { return std::int64_t{i} * z.step(); });
            scores.load(z.scores(), rows, [](int i) { return i * rows; });
        }
#pragma unroll
        for (int u = 0; u < Columns::most; ++u) {
            unit_k[u] = z.unit_keys()[Columns::row(u)];
            if (queries) unit_q[u] = z.unit_queries()[Columns::row(u)];
        }
        if (threadIdx.x < rows) e = z.e()[threadIdx.x], f = z.f()[threadIdx.x];
    }
};

// Passes `slice` columns of a head's state through its chunks; each warp of the first half keeps its piece in
// registers. Without gradients the second half computes o; with them V' and the state before each chunk are kept in
// `work`.
template <bool grad>
__global__ void __launch_bounds__(many) states_kernel(Rule r, Dst o) {
    extern __shared__ __align__(16) float memory[];
    __shared__ float e[rows], f[rows];
    const int first = static_cast<int>(blockIdx.x) * slice, t = static_cast<int>(threadIdx.x), mine = t % threads;
    const bool passes = t < threads;
    float *w = memory, *q = w + rows * wide_stride, *k = q + rows * wide_stride, *scores = k + rows * wide_stride,
          *fresh = scores + rows * square_stride, *kept = fresh + rows * slice_stride,
          *state = kept + rows * slice_stride;
    for (int item = t; item < widest * slice_stride; item += many) state[item] = 0.0f;
    Sums<widest, slice> s(mine);
    Ahead ahead;
    ahead.load(Place(r, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), 0), first, !grad);
    for (std::int64_t chunk = 0; chunk < r.chunks; ++chunk) {
        const Place z(r, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), chunk);
        ahead.w.put(w, wide_stride);
        ahead.k.put(
            [&](int u, int i, int j, float4 x) { four(k + i * wide_stride + j) = tf32(times(x, ahead.unit_k[u])); });
        ahead.fresh.put([&](int, int i, int j, float4 x) { four(fresh + i * slice_stride + j) = x; });
        if (!grad) {
            ahead.q.put([&](int u, int i, int j, float4 x) {
                four(q + i * wide_stride + j) = tf32(times(x, ahead.unit_q[u]));
            });
            ahead.scores.put(scores, square_stride);
        }
        if (t < rows) e[t] = ahead.e, f[t] = ahead.f;
        if (chunk + 1 < r.chunks)
            ahead.load(Place(r, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), chunk + 1), first, !grad);
        if (grad && passes) s.each([&](int i, int j, float4& x) { four(z.state() + i * widest + first + j) = x; });
        __syncthreads();
        const float carried = e[z.n - 1];
        Sums<rows, slice> own(mine); // W S, or what becomes o
        if (passes) {
            own.multiply<false, false>(widest, w, wide_stride, state, slice_stride);
            own.each([&](int i, int j, float4& x) { // Nobody else reads this thread's places before.
                const float4 v = i < z.n ? plus(four(fresh + i * slice_stride + j), times(x, -1.0f)) : float4{};
                four(fresh + i * slice_stride + j) = tf32(v);
                four(kept + i * slice_stride + j) = tf32(times(v, f[i]));
                if (grad && i < z.n) four(z.fresh() + i * widest + first + j) = v;
            });
            s.each([&](int, int, float4& x) { x = times(x, carried); });
        } else if (!grad) {
            own.multiply<false, false>(widest, q, wide_stride, state, slice_stride);
            own.each([&](int i, int, float4& x) { x = times(x, e[i]); });
        }
        __syncthreads();
        if (passes) {
            s.multiply<true, false>(rows, k, wide_stride, kept, slice_stride);
            s.put(state, slice_stride);
        } else if (!grad) {
            own.multiply<false, false>(rows, scores, square_stride, fresh, slice_stride);
            own.each([&](int i, int j, float4& x) {
                if (i >= z.n) return;
                const std::int64_t at = z.o(i) + first + j;
                store(o, at, x.x), store(o, at + 1, x.y), store(o, at + 2, x.z), store(o, at + 3, x.w);
            });
        }
        __syncthreads();
    }
}

} // namespace

void run_tensor_states(const Rule& r, Dst o, cudaStream_t stream) {
    const auto heads = static_cast<unsigned>(r.s.value_heads), batch = static_cast<unsigned>(r.s.batch);
    constexpr std::size_t systems = sizeof(float) * rows * (2 * wide_stride + 2 * square_stride),
                          states = sizeof(float) * (rows * (3 * wide_stride + square_stride + 2 * slice_stride) +
                                                    widest * slice_stride);
    allow_shared(systems_kernel, systems);
    systems_kernel<<<dim3(static_cast<unsigned>(r.chunks), heads, batch), threads, systems, stream>>>(r);
    CUDA_CHECK(cudaGetLastError());
    const auto kernel = r.grad ? states_kernel<true> : states_kernel<false>;
    allow_shared(kernel, states);
    kernel<<<dim3(widest / slice, heads, batch), many, states, stream>>>(r, o);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace moe::cuda::delta
