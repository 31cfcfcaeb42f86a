// The gated delta rule forward: systems of all chunks at once, then states from chunk to chunk.
//
// Floor: the products of kernels/kernel_args.hpp's formulas in FP32, 2 (3 dk dv + 64 (dk + dv)) FLOPs for each token
// and value head, or q, k, v and the gates in and o out. Products here are of FP32 whatever the operands are stored in.
#include "kernels/cuda/delta_tiles.cuh"

#include "kernels/cuda/delta_rule.hpp"
#include "kernels/cuda/families.hpp"

namespace moe::cuda {
namespace delta {

// W, U and the scores of a chunk, and what is kept of its rows. Shared memory: [keys | queries, then W | U | A], rows *
// stride each.
template <bool tensor>
__global__ void __launch_bounds__(threads) systems_kernel(Rule r) {
    extern __shared__ __align__(16) float memory[];
    __shared__ Gates g;
    __shared__ float unit_k[rows], unit_q[rows];
    const Place z(r, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), blockIdx.x);
    const int dk = r.s.key_dim, dv = r.s.value_dim, ks = stride_of(dk), vs = stride_of(dv), as = stride_of(rows);
    const int t = static_cast<int>(threadIdx.x);
    float *k = memory, *w = k + rows * ks, *u = w + rows * ks, *a = u + rows * vs;
    fetch<tensor>(k, r.c, dk, z.n, [&](int i) { return z.k(i); });
    fetch<tensor>(w, r.c, dk, z.n, [&](int i) { return z.q(i); });
    fetch<tensor>(u, r.c, dv, z.n, [&](int i) { return z.v(i); });
    read_gates(z, g);
    to_units(k, dk, 1.0f, unit_k);
    to_units(w, dk, rsqrtf(static_cast<float>(dk)), unit_q);
    __syncthreads();
    if (t < rows) z.e()[t] = g.e[t], z.f()[t] = g.f[t], z.unit_keys()[t] = unit_k[t], z.unit_queries()[t] = unit_q[t];
    product<tensor, false, true>(rows, rows, dk, w, ks, k, ks,
                                 [&](int i, int j, float x) { z.scores()[i * rows + j] = x * between(g, i, j); });
    product<tensor, false, true>(rows, rows, dk, k, ks, k, ks, [&](int i, int j, float x) {
        a[i * as + j] = j < i ? g.beta[i] * x * between(g, i, j) : 0.0f;
    });
    __syncthreads();
    for (int item = t; item < rows * ks; item += threads) w[item] = k[item] * g.beta[item / ks] * g.e[item / ks];
    for (int item = t; item < rows * vs; item += threads) u[item] *= g.beta[item / vs];
    __syncthreads();
    solve<false>(a, as, w, dk, u, dv);
    __syncthreads();
    for (int item = t; item < rows * dk; item += threads) z.w()[item] = w[item / dk * ks + item % dk];
    for (int item = t; item < rows * dv; item += threads) z.fresh()[item] = u[item / dv * vs + item % dv];
}

// Passes `slice` columns of a head's state through its chunks. Without gradients o is written; with them V' and the
// state before each chunk are kept in `work`.
template <bool tensor>
__global__ void __launch_bounds__(threads) states_kernel(Rule r, Dst o) {
    extern __shared__ __align__(16) float memory[];
    const int first = static_cast<int>(blockIdx.x) * slice, t = static_cast<int>(threadIdx.x);
    const int dk = r.s.key_dim, dv = r.s.value_dim, n = padded(dv - first < slice ? dv - first : slice);
    const int ks = stride_of(dk), ss = stride_of(slice), as = stride_of(rows);
    float *w = memory, *q = w + rows * ks, *k = q + rows * ks, *scores = k + rows * ks, *fresh = scores + rows * as,
          *out = fresh + rows * ss, *state = out + rows * ss, *e = state + padded(dk) * ss, *f = e + rows;
    for (int item = t; item < padded(dk) * ss; item += threads) state[item] = 0.0f;
    ChunkAhead<tensor> ahead(r, !r.grad);
    ahead.begin(0, first, n, [](const Place& z) { return z.fresh(); });
    for (std::int64_t chunk = 0; chunk < r.chunks; ++chunk) {
        const Place z(r, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), chunk);
        ahead.put(w, k, q, scores, fresh, e, f);
        if (chunk + 1 < r.chunks) ahead.begin(chunk + 1, first, n, [](const Place& next) { return next.fresh(); });
        if (r.grad)
            for (int item = t; item < dk * n; item += threads) {
                const int i = item / n, j = item % n;
                if (first + j < dv) z.state()[i * dv + first + j] = state[i * ss + j];
            }
        __syncthreads();
        const float carried = e[z.n - 1];
        product<tensor, false, false>(rows, n, dk, w, ks, state, ss, [&](int i, int j, float x) {
            const bool in = i < z.n && first + j < dv;
            const float value = in ? fresh[i * ss + j] - x : 0.0f;
            fresh[i * ss + j] = value;
            if (r.grad && in) z.fresh()[i * dv + first + j] = value;
        });
        // The same thread adds both parts of an element.
        if (!r.grad)
            product<tensor, false, false>(rows, n, dk, q, ks, state, ss,
                                          [&](int i, int j, float x) { out[i * ss + j] = e[i] * x; });
        __syncthreads();
        if (!r.grad)
            product<tensor, false, false>(rows, n, rows, scores, as, fresh, ss, [&](int i, int j, float x) {
                if (i < z.n && first + j < dv) store(o, z.o(i) + first + j, out[i * ss + j] + x);
            });
        for (int item = t; item < rows * ks; item += threads) k[item] *= f[item / ks];
        __syncthreads();
        product<tensor, true, false>(padded(dk), n, rows, k, ks, fresh, ss, [&](int i, int j, float x) {
            state[i * ss + j] = carried * state[i * ss + j] + x;
        });
        __syncthreads();
    }
}

void check_shape(const DeltaShape& s) {
    const int most = s.key_dim > s.value_dim ? s.key_dim : s.value_dim;
    require(most <= widest, "columns of a head of a delta rule", most, widest);
    require(s.batch <= 65535, "sequences of a delta rule", s.batch, 65535);
}

void run_states(const Rule& r, Dst o, cudaStream_t stream) {
    const DeltaShape& s = r.s;
    const auto bytes = [](int floats) { return static_cast<std::size_t>(floats) * sizeof(float); };
    const int ks = stride_of(s.key_dim), vs = stride_of(s.value_dim), as = stride_of(rows);
    const std::size_t systems = bytes(rows * (2 * ks + vs + as)),
                      states =
                          bytes(rows * (3 * ks + as + 2 * stride_of(slice) + 2) + padded(s.key_dim) * stride_of(slice));
    const auto heads = static_cast<unsigned>(s.value_heads), batch = static_cast<unsigned>(s.batch);
    const auto run = [&](auto by_tensor_cores) {
        constexpr bool tensor = decltype(by_tensor_cores)::value;
        allow_shared(systems_kernel<tensor>, systems);
        systems_kernel<tensor><<<dim3(static_cast<unsigned>(r.chunks), heads, batch), threads, systems, stream>>>(r);
        CUDA_CHECK(cudaGetLastError());
        allow_shared(states_kernel<tensor>, states);
        states_kernel<tensor><<<dim3(blocks_for(s.value_dim, slice), heads, batch), threads, states, stream>>>(r, o);
        CUDA_CHECK(cudaGetLastError());
    };
    if (r.tensor) {
        run(std::true_type{});
    } else {
        run(std::false_type{});
    }
}

} // namespace delta

namespace {

void delta_rule(const DeltaShape& s, Src c, Src p, Src a_log, Src dt_bias, Dst o, float* work, void* stream) {
    if (s.rows <= 0) return;
    delta::check_shape(s);
    delta::run_states(delta::Rule(s, c, p, a_log, dt_bias, work, false), o, stream_of(stream));
}

} // namespace

void add_delta_rule(Kernels& table) {
    table.delta_rule = delta_rule;
    add_delta_rule_grad(table);
}

} // namespace moe::cuda
