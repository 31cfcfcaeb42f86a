// The gradients of the gated delta rule on the tensor cores: those of the states from the last chunk to the first, then
// all chunks at once. What rows_kernel and weights_kernel sum up is left in `work`.
//
// Floor: 2.5 times the forward's FLOPs. Formulas: kernels/cpu/delta_rule.cpp; sums over columns of the chunk's squares
// are products of rows instead: q . dq and k . dk.
#include "kernels/cuda/delta_tensor.cuh"

namespace moe::cuda::delta {
namespace {

constexpr int many = 2 * threads; // a block has an SM alone: so many warps hide each other's waits
using Columns = Elements<many>;

// What the next chunk brings, on its way while the one behind is computed.
struct Ahead {
    Packs<float, widest, rows, many> w;
    Columns k, q;
    Packs<float, rows, rows, many> scores;
    Packs<__nv_bfloat16, slice, rows, many> grad;
    float unit_k[Columns::most], unit_q[Columns::most], e_of_grad = 0.0f, e = 0.0f, f = 0.0f;

    __device__ void load(const Place& z, Src dout, int first) {
        w.load(z.w(), rows, [](int i) { return i * widest; });
        k.load(elements(z.r.c) + z.k(0), z.n, [&](int i) { return std::int64_t{i} * z.step(); });
        q.load(elements(z.r.c) + z.q(0), z.n, [&](int i) { return std::int64_t{i} * z.step(); });
        scores.load(z.scores(), rows, [](int i) { return i * rows; });
        grad.load(elements(dout) + z.o(0) + first, z.n, [&](int i) { return std::int64_t{i} * z.step_of_o(); });
#pragma unroll
        for (int u = 0; u < Columns::most; ++u)
            unit_k[u] = z.unit_keys()[Columns::row(u)], unit_q[u] = z.unit_queries()[Columns::row(u)];
        if (grad.row(0) < rows) e_of_grad = z.e()[grad.row(0)];
        if (threadIdx.x < rows) e = z.e()[threadIdx.x], f = z.f()[threadIdx.x];
    }
};

// The gradient of the state behind each chunk, and that of V'. Each warp of the second half keeps its piece of the
// first in registers and adds what does not wait for V' while the first half computes that.
__global__ void __launch_bounds__(many) dstates_kernel(Rule r, Src dout) {
    extern __shared__ __align__(16) float memory[];
    __shared__ float e[rows], f[rows];
    const int first = static_cast<int>(blockIdx.x) * slice, t = static_cast<int>(threadIdx.x), mine = t % threads;
    const bool passes = t >= threads;
    float *w = memory, *q = w + rows * wide_stride, *k = q + rows * wide_stride, *scores = k + rows * wide_stride,
          *grad = scores + rows * square_stride, *e_grad = grad + rows * slice_stride,
          *less = e_grad + rows * slice_stride, *dstate = less + rows * slice_stride;
    for (int item = t; item < widest * slice_stride; item += many) dstate[item] = 0.0f;
    Sums<widest, slice> s(mine);
    Ahead ahead;
    ahead.load(Place(r, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), r.chunks - 1), dout, first);
    for (std::int64_t chunk = r.chunks - 1; chunk >= 0; --chunk) {
        const Place z(r, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), chunk);
        ahead.w.put(w, wide_stride);
        ahead.k.put(
            [&](int u, int i, int j, float4 x) { four(k + i * wide_stride + j) = tf32(times(x, ahead.unit_k[u])); });
        ahead.q.put(
            [&](int u, int i, int j, float4 x) { four(q + i * wide_stride + j) = tf32(times(x, ahead.unit_q[u])); });
        ahead.scores.put(scores, square_stride);
        ahead.grad.put([&](int, int i, int j, float4 x) {
            four(grad + i * slice_stride + j) = x; // BF16 is TF32
            four(e_grad + i * slice_stride + j) = tf32(times(x, ahead.e_of_grad));
        });
        if (t < rows) e[t] = ahead.e, f[t] = ahead.f;
        if (chunk > 0)
            ahead.load(Place(r, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), chunk - 1), dout, first);
        if (passes) s.each([&](int i, int j, float4& x) { four(z.dstate() + i * widest + first + j) = x; });
        __syncthreads();
        if (passes) {
            const float carried = e[z.n - 1];
            s.each([&](int, int, float4& x) { x = times(x, carried); });
            s.multiply<true, false>(rows, q, wide_stride, e_grad, slice_stride);
        } else {
            Sums<rows, slice> dfresh(mine);
            dfresh.multiply<false, false>(widest, k, wide_stride, dstate, slice_stride);
            dfresh.each([&](int i, int, float4& x) { x = times(x, f[i]); });
            dfresh.multiply<true, false>(rows, scores, square_stride, grad, slice_stride);
            dfresh.each([&](int i, int j, float4& x) {
                four(less + i * slice_stride + j) = tf32(times(x, -1.0f));
                four(z.dfresh() + i * widest + first + j) = x; // zeros behind the last position
            });
        }
        __syncthreads();
        if (passes) {
            s.multiply<true, false>(rows, w, wide_stride, less, slice_stride);
            s.put(dstate, slice_stride);
        }
        __syncthreads();
    }
}

// The rest of a chunk. Gradients of unit queries and keys go to `work`; values' and the gates' to dc and dp. Shared
// memory: one matrix of the state's shape, four of a chunk's rows and one of its squares, of which each holds one
// operand after another.
__global__ void __launch_bounds__(many) chunks_kernel(Rule r, Src dout, Dst dc, Dst dp) {
    extern __shared__ __align__(16) float memory[];
    __shared__ Gates g;
    __shared__ float dg[rows], dbeta[rows];
    __shared__ union {
        RowSums<widest, many> sums;
        float between_[3 * 256];
    } shared;
    const Place z(r, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), blockIdx.x);
    const int t = static_cast<int>(threadIdx.x);
    constexpr int size = rows * wide_stride;
    float *state = memory, *k = state + widest * wide_stride, *one = k + size, *two_ = one + size, *three = two_ + size,
          *square = three + size;
    float *const system = state, *const large = system + rows * square_stride, *const inverse = square;
    RowSums<widest, many>& sums = shared.sums;
    if (t < rows) dg[t] = dbeta[t] = 0.0f;

    // dk = f V' dS'^T and (do V'^T o D). one: do; two: q; three: V'.
    Columns keys, queries, grads;
    Packs<float, widest, rows, many> news, packs;
    Packs<float, widest, widest, many> whole;
    whole.load(z.dstate(), widest, [](int i) { return i * widest; });
    keys.load(elements(r.c) + z.k(0), z.n, [&](int i) { return std::int64_t{i} * z.step(); });
    queries.load(elements(r.c) + z.q(0), z.n, [&](int i) { return std::int64_t{i} * z.step(); });
    grads.load(elements(dout) + z.o(0), z.n, [&](int i) { return std::int64_t{i} * z.step_of_o(); });
    news.load(z.fresh(), z.n, [](int i) { return i * widest; });
    whole.put(state, wide_stride);
    float share = 0.0f;
    {
        Packs<float, widest, widest, many> before;
        before.load(z.state(), widest, [](int i) { return i * widest; });
        before.put([&](int, int i, int j, float4 x) { share += dot(x, four(state + i * wide_stride + j)); });
        keys.put([&](int u, int i, int j, float4 x) {
            four(k + i * wide_stride + j) = tf32(times(x, z.unit_keys()[Columns::row(u)]));
        });
        queries.put([&](int u, int i, int j, float4 x) {
            four(two_ + i * wide_stride + j) = tf32(times(x, z.unit_queries()[Columns::row(u)]));
        });
        grads.put(one, wide_stride);
        news.put(three, wide_stride);
        read_gates(z, g);
        const float carried = block_sum(share);
        if (t == 0) dg[z.n - 1] = g.carried * carried;
        Sums<rows, widest, many> dk;
        dk.multiply<false, true>(widest, three, wide_stride, state, wide_stride);
        dk.each([&](int i, int, float4& x) { x = times(x, g.f[i]); });
        Sums<rows, rows, many> p;
        p.multiply<false, true>(widest, one, wide_stride, three, wide_stride);
        p.each([&](int i, int j, float4& x) {
            four(square + i * square_stride + j) = tf32(float4{x.x * between(g, i, j), x.y * between(g, i, j + 1),
                                                               x.z * between(g, i, j + 2), x.w * between(g, i, j + 3)});
        });
        float behind = 0.0f; // sum k . (f V' dS'^T)
        dk.each([&](int i, int j, float4& x) { behind += dot(x, four(k + i * wide_stride + j)); });
        behind = block_sum(behind);
        if (t == 0) dg[z.n - 1] += behind;
        __syncthreads();
        before.put(state, wide_stride);
        packs.load(z.w(), rows, [](int i) { return i * widest; });
        __syncthreads();

        // Queries; keys of the scores; then q . dq and k . dk.
        Sums<rows, widest, many> dq;
        dq.multiply<false, true>(widest, one, wide_stride, state, wide_stride);
        dq.each([&](int i, int, float4& x) { x = times(x, g.e[i]); });
        dq.multiply<false, false>(rows, square, square_stride, k, wide_stride);
        dk.multiply<true, false>(rows, square, square_stride, two_, wide_stride);
        sums.gather(dq, [&](int i, int j, float4 x) {
            four(z.dq() + i * widest + j) = x;
            return dot(x, four(two_ + i * wide_stride + j));
        });
        __syncthreads();
        if (t < rows) dg[t] += sums.of(t);
        __syncthreads();
        sums.gather(dk, [&](int i, int j, float4 x) {
            four(z.dk() + i * widest + j) = x;
            return dot(x, four(k + i * wide_stride + j));
        });
        packs.put(two_, wide_stride); // W
        packs.load(z.dfresh(), rows, [](int i) { return i * widest; });
        __syncthreads();
        if (t < rows) dg[t] -= sums.of(t);
    }

    // U = V' + W S in place of V'; -dV' S^T; the system and its inverse. one: dV'; two: W.
    packs.put(one, wide_stride);
    Sums<rows, widest, many> dx, u;
    u.multiply<false, false>(widest, two_, wide_stride, state, wide_stride);
    u.each([&](int i, int j, float4& x) {
        float4& at = four(three + i * wide_stride + j);
        at = tf32(plus(at, x));
    });
    __syncthreads();
    dx.multiply<false, true>(widest, one, wide_stride, state, wide_stride);
    __syncthreads();
    {
        Sums<rows, rows, many> a;
        a.multiply<false, true>(widest, k, wide_stride, k, wide_stride);
        a.each([&](int i, int j, float4& x) {
            const float by = g.beta[i];
            four(system + i * square_stride + j) = {
                j < i ? by * x.x * between(g, i, j) : 0.0f, j + 1 < i ? by * x.y * between(g, i, j + 1) : 0.0f,
                j + 2 < i ? by * x.z * between(g, i, j + 2) : 0.0f, j + 3 < i ? by * x.w * between(g, i, j + 3) : 0.0f};
        });
    }
    __syncthreads();
    invert<many>(system, inverse, shared.between_);
    for (int item = t; item < rows * rows; item += many) {
        float& at = inverse[item / rows * square_stride + item % rows];
        at = tf32(at);
    }
    // large: -dV' S^T, then dX, where the state has been.
    dx.each([&](int i, int j, float4& x) { four(large + i * wide_stride + j) = tf32(times(x, -1.0f)); });
    __syncthreads();
    Sums<rows, widest, many> dy;
    dx.clear();
    dx.multiply<true, false>(rows, inverse, square_stride, large, wide_stride);
    dy.multiply<true, false>(rows, inverse, square_stride, one, wide_stride);
    __syncthreads();
    dx.put(large, wide_stride);
    dy.put(one, wide_stride);
    Columns values;
    values.load(elements(r.c) + z.v(0), z.n, [&](int i) { return std::int64_t{i} * z.step(); });
    __syncthreads();

    // square: dA o D.
    {
        Sums<rows, rows, many> da;
        da.multiply<false, true>(widest, large, wide_stride, two_, wide_stride);
        da.multiply<false, true>(widest, one, wide_stride, three, wide_stride);
        da.each([&](int i, int j, float4& x) {
            four(square + i * square_stride + j) = tf32(
                float4{j < i ? -x.x * between(g, i, j) : 0.0f, j + 1 < i ? -x.y * between(g, i, j + 1) : 0.0f,
                       j + 2 < i ? -x.z * between(g, i, j + 2) : 0.0f, j + 3 < i ? -x.w * between(g, i, j + 3) : 0.0f});
        });
    }
    sums.gather(dx, [&](int i, int j, float4 x) { return dot(x, four(k + i * wide_stride + j)); });
    __syncthreads();
    if (t < rows) {
        const float x = sums.of(t);
        dbeta[t] += g.e[t] * x;
        dg[t] += g.beta[t] * g.e[t] * x;
    }
    values.put(two_, wide_stride);
    __syncthreads();
    sums.gather(dy, [&](int i, int j, float4 x) {
        if (i < z.n) {
            const std::int64_t at = z.v(i) + j;
            const float by = g.beta[i];
            store(dc, at, by * x.x), store(dc, at + 1, by * x.y), store(dc, at + 2, by * x.z),
                store(dc, at + 3, by * x.w);
        }
        return dot(x, four(two_ + i * wide_stride + j));
    });
    __syncthreads();
    if (t < rows) dbeta[t] += sums.of(t);
    __syncthreads();
    Sums<rows, widest, many> dk;
    dk.multiply<false, false>(rows, square, square_stride, k, wide_stride);
    sums.gather(dk, [&](int i, int j, float4 x) { return dot(x, four(k + i * wide_stride + j)); });
    __syncthreads();
    if (t < rows) {
        const float x = sums.of(t);
        dbeta[t] += x;
        dg[t] += g.beta[t] * x;
    }
    for (int item = t; item < rows * rows; item += many) {
        float& at = square[item / rows * square_stride + item % rows];
        at = tf32(at * g.beta[item / rows]);
    }
    __syncthreads();
    Sums<rows, widest, many> last;
    last.multiply<true, false>(rows, square, square_stride, k, wide_stride);
    sums.gather(last, [&](int i, int j, float4 x) { return dot(x, four(k + i * wide_stride + j)); });
    // The three have the same elements of the same threads, and dx, too.
    dk.each([&](int i, int j, float4& x) {
        const float4 back = four(large + i * wide_stride + j); // dX, rounded
        float4& at = four(z.dk() + i * widest + j);
        at = plus(at, times(plus(x, times(back, g.e[i])), g.beta[i]));
    });
    last.each([&](int i, int j, float4& x) {
        float4& at = four(z.dk() + i * widest + j);
        at = plus(at, x);
    });
    __syncthreads();
    if (t < rows) dg[t] -= sums.of(t);
    __syncthreads();

    if (t == 0)
        for (int i = z.n - 2; i >= 0; --i) dg[i] += dg[i + 1]; // from sums within the chunk to g
    __syncthreads();
    float a_log = 0.0f, bias = 0.0f;
    if (t < z.n) {
        const float beta = g.beta[t], step = load(r.p, z.decay(t)) + load(r.dt_bias, z.weight());
        const float da = -dg[t] * expf(load(r.a_log, z.weight())) / (1.0f + expf(-step));
        store(dp, z.beta(t), dbeta[t] * beta * (1.0f - beta));
        store(dp, z.decay(t), da);
        a_log = dg[t] * g.g[t];
        bias = da;
    }
    a_log = block_sum(a_log);
    bias = block_sum(bias);
    if (t == 0) z.sums()[0] = a_log, z.sums()[1] = bias;
}

} // namespace

void run_tensor_grads(const Rule& r, Src dout, Dst dc, Dst dp, cudaStream_t stream) {
    const auto heads = static_cast<unsigned>(r.s.value_heads), batch = static_cast<unsigned>(r.s.batch);
    constexpr std::size_t dstates = sizeof(float) * (rows * (3 * wide_stride + square_stride + 3 * slice_stride) +
                                                     widest * slice_stride),
                          chunks = sizeof(float) * (widest * wide_stride + rows * (4 * wide_stride + square_stride));
    static_assert(rows * (square_stride + wide_stride) <= widest * wide_stride, "what lies where the state has been");
    allow_shared(dstates_kernel, dstates);
    dstates_kernel<<<dim3(widest / slice, heads, batch), many, dstates, stream>>>(r, dout);
    CUDA_CHECK(cudaGetLastError());
    allow_shared(chunks_kernel, chunks);
    chunks_kernel<<<dim3(static_cast<unsigned>(r.chunks), heads, batch), many, chunks, stream>>>(r, dout, dc, dp);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace moe::cuda::delta
