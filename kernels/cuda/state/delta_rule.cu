// The gated delta rule forward: systems of all chunks at once, then states from chunk to chunk. Heads of 128 columns in
// BF16 are delta_tensor.cu's.
//
// Floor: the products of kernels/kernel_args.hpp's formulas in FP32, 2 (3 dk dv + 64 (dk + dv)) FLOPs for each token
// and value head, or q, k, v and the gates in and o out. Products here are of FP32 whatever the operands are stored in.
#include "kernels/cuda/state/delta_tensor.cuh"

#include "kernels/cuda/families.hpp"
#include "kernels/cuda/state/delta_rule.hpp"

namespace moe::cuda {
namespace delta {

// W, U and the scores of a chunk. Shared memory: [keys | queries, then W | U | A], rows * stride each.
__global__ void __launch_bounds__(threads) systems_kernel(Rule r) {
    extern __shared__ __align__(16) float memory[];
    __shared__ Gates g;
    const Place z(r, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), blockIdx.x);
    const int dk = r.s.key_dim, dv = r.s.value_dim, ks = stride_of(dk), vs = stride_of(dv), as = stride_of(rows);
    float *k = memory, *w = k + rows * ks, *u = w + rows * ks, *a = u + rows * vs;
    fetch(k, r.c, dk, z.n, [&](int i) { return z.k(i); });
    fetch(w, r.c, dk, z.n, [&](int i) { return z.q(i); });
    fetch(u, r.c, dv, z.n, [&](int i) { return z.v(i); });
    read_gates(z, g);
    to_units(k, dk, 1.0f);
    to_units(w, dk, rsqrtf(static_cast<float>(dk)));
    __syncthreads();
    product<false, true>(rows, rows, dk, w, ks, k, ks,
                         [&](int i, int j, float x) { z.scores()[i * rows + j] = x * between(g, i, j); });
    product<false, true>(rows, rows, dk, k, ks, k, ks, [&](int i, int j, float x) {
        a[i * as + j] = j < i ? g.beta[i] * x * between(g, i, j) : 0.0f;
    });
    __syncthreads();
    for (int item = static_cast<int>(threadIdx.x); item < rows * ks; item += threads)
        w[item] = k[item] * g.beta[item / ks] * g.e[item / ks];
    for (int item = static_cast<int>(threadIdx.x); item < rows * vs; item += threads) u[item] *= g.beta[item / vs];
    __syncthreads();
    solve<false>(a, as, w, dk, u, dv);
    __syncthreads();
    for (int item = static_cast<int>(threadIdx.x); item < rows * dk; item += threads)
        z.w()[item] = w[item / dk * ks + item % dk];
    for (int item = static_cast<int>(threadIdx.x); item < rows * dv; item += threads)
        z.fresh()[item] = u[item / dv * vs + item % dv];
}

// Passes `slice` columns of a head's state through its chunks. Without gradients o is written; with them V' and the
// state before each chunk are kept in `work`.
__global__ void __launch_bounds__(threads) states_kernel(Rule r, Dst o) {
    extern __shared__ __align__(16) float memory[];
    __shared__ Gates g;
    const int first = static_cast<int>(blockIdx.x) * slice;
    const int dk = r.s.key_dim, dv = r.s.value_dim, n = padded(dv - first < slice ? dv - first : slice);
    const int ks = stride_of(dk), ss = stride_of(slice), as = stride_of(rows);
    float *w = memory, *q = w + rows * ks, *k = q + rows * ks, *scores = k + rows * ks, *fresh = scores + rows * as,
          *out = fresh + rows * ss, *state = out + rows * ss;
    for (int item = static_cast<int>(threadIdx.x); item < padded(dk) * ss; item += threads) state[item] = 0.0f;
    for (std::int64_t chunk = 0; chunk < r.chunks; ++chunk) {
        const Place z(r, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), chunk);
        fetch_work(w, z.w(), dk, rows);
        fetch(k, r.c, dk, z.n, [&](int i) { return z.k(i); });
        if (!r.grad) {
            fetch(q, r.c, dk, z.n, [&](int i) { return z.q(i); });
            fetch_work(scores, z.scores(), rows, rows);
        }
        read_gates(z, g);
        to_units(k, dk, 1.0f);
        if (!r.grad) to_units(q, dk, rsqrtf(static_cast<float>(dk)));
        if (r.grad)
            for (int item = static_cast<int>(threadIdx.x); item < dk * n; item += threads) {
                const int i = item / n, j = item % n;
                if (first + j < dv) z.state()[i * dv + first + j] = state[i * ss + j];
            }
        __syncthreads();
        product<false, false>(rows, n, dk, w, ks, state, ss, [&](int i, int j, float x) {
            const bool in = i < z.n && first + j < dv;
            const float value = in ? z.fresh()[i * dv + first + j] - x : 0.0f;
            fresh[i * ss + j] = value;
            if (r.grad && in) z.fresh()[i * dv + first + j] = value;
        });
        __syncthreads();
        if (!r.grad) {
            // The same thread adds both parts of an element.
            product<false, false>(rows, n, dk, q, ks, state, ss,
                                  [&](int i, int j, float x) { out[i * ss + j] = g.e[i] * x; });
            product<false, false>(rows, n, rows, scores, as, fresh, ss, [&](int i, int j, float x) {
                if (i < z.n && first + j < dv) store(o, z.o(i) + first + j, out[i * ss + j] + x);
            });
        }
        for (int item = static_cast<int>(threadIdx.x); item < rows * ks; item += threads) k[item] *= g.f[item / ks];
        __syncthreads();
        product<true, false>(padded(dk), n, rows, k, ks, fresh, ss,
                             [&](int i, int j, float x) { state[i * ss + j] = g.carried * state[i * ss + j] + x; });
        __syncthreads();
    }
}

void check_shape(const StateShape& s) {
    const int most = s.key_dim > s.value_dim ? s.key_dim : s.value_dim;
    require(most <= widest, "columns of a head of a delta rule", most, widest);
    require(s.batch <= 65535, "sequences of a delta rule", s.batch, 65535);
}

void run_states(const Rule& r, Dst o, cudaStream_t stream) {
    const StateShape& s = r.s;
    const auto bytes = [](int floats) { return static_cast<std::size_t>(floats) * sizeof(float); };
    const int ks = stride_of(s.key_dim), vs = stride_of(s.value_dim), as = stride_of(rows);
    const std::size_t systems = bytes(rows * (2 * ks + vs + as)),
                      states =
                          bytes(rows * (3 * ks + as + 2 * stride_of(slice)) + padded(s.key_dim) * stride_of(slice));
    const auto heads = static_cast<unsigned>(s.value_heads), batch = static_cast<unsigned>(s.batch);
    CUDA_CHECK(
        cudaFuncSetAttribute(systems_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(systems)));
    systems_kernel<<<dim3(static_cast<unsigned>(r.chunks), heads, batch), threads, systems, stream>>>(r);
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(
        cudaFuncSetAttribute(states_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(states)));
    states_kernel<<<dim3(blocks_for(s.value_dim, slice), heads, batch), threads, states, stream>>>(r, o);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace delta

namespace {

void delta_rule(const StateShape& s, Src c, Src p, Src a_log, Src dt_bias, Dst o, float* work, void* stream) {
    if (s.rows <= 0) return;
    delta::check_shape(s);
    const delta::Rule r(s, c, p, a_log, dt_bias, work, false);
    (delta::tensor_takes(r, {c, {o.data, o.type}}) ? delta::run_tensor_states : delta::run_states)(r, o,
                                                                                                   stream_of(stream));
}

} // namespace

void add_delta_rule(Kernels& table) {
    table.delta_rule = delta_rule;
    add_delta_rule_grad(table);
}

} // namespace moe::cuda
