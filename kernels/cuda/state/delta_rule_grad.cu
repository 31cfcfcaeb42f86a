// The gradients of the gated delta rule: states again, their gradients from the last chunk to the first, then all
// chunks at once, and the sums over value heads that share a key head and over what shares a head's weights.
//
// Floor: 2.5 times the forward's FLOPs. Formulas are those of kernels/cpu/delta_rule.cpp; sums over columns of the
// chunk's squares are products of rows instead: q . dq and k . dk.
#include "kernels/cuda/state/delta_rule.hpp"

#include "kernels/cuda/state/delta_tensor.cuh"

namespace moe::cuda {
namespace delta {
namespace {

// The gradient of the state behind each chunk, and that of V'.
__global__ void __launch_bounds__(threads) dstates_kernel(Rule r, Src dout) {
    extern __shared__ __align__(16) float memory[];
    __shared__ Gates g;
    const int first = static_cast<int>(blockIdx.x) * slice;
    const int dk = r.s.key_dim, dv = r.s.value_dim, n = padded(dv - first < slice ? dv - first : slice);
    const int ks = stride_of(dk), ss = stride_of(slice), as = stride_of(rows);
    float *w = memory, *q = w + rows * ks, *k = q + rows * ks, *scores = k + rows * ks, *dfresh = scores + rows * as,
          *grad = dfresh + rows * ss, *dstate = grad + rows * ss;
    for (int item = static_cast<int>(threadIdx.x); item < padded(dk) * ss; item += threads) dstate[item] = 0.0f;
    for (std::int64_t chunk = r.chunks - 1; chunk >= 0; --chunk) {
        const Place z(r, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), chunk);
        fetch_work(w, z.w(), dk, rows);
        fetch(k, r.c, dk, z.n, [&](int i) { return z.k(i); });
        fetch(q, r.c, dk, z.n, [&](int i) { return z.q(i); });
        fetch_work(scores, z.scores(), rows, rows);
        for (int item = static_cast<int>(threadIdx.x); item < rows * slice; item += threads) {
            const int i = item / slice, j = item % slice;
            grad[i * ss + j] = i < z.n && first + j < dv ? load(dout, z.o(i) + first + j) : 0.0f;
        }
        read_gates(z, g);
        to_units(k, dk, 1.0f);
        to_units(q, dk, rsqrtf(static_cast<float>(dk)));
        for (int item = static_cast<int>(threadIdx.x); item < dk * n; item += threads) {
            const int i = item / n, j = item % n;
            if (first + j < dv) z.dstate()[i * dv + first + j] = dstate[i * ss + j];
        }
        __syncthreads();
        // Both parts of an element are the same thread's.
        product<true, false>(rows, n, rows, scores, as, grad, ss,
                             [&](int i, int j, float x) { dfresh[i * ss + j] = x; });
        product<false, false>(rows, n, dk, k, ks, dstate, ss, [&](int i, int j, float x) {
            const float value = dfresh[i * ss + j] + g.f[i] * x;
            dfresh[i * ss + j] = value;
            if (first + j < dv) z.dfresh()[i * dv + first + j] = value; // zeros behind the last position
        });
        for (int item = static_cast<int>(threadIdx.x); item < rows * ks; item += threads) q[item] *= g.e[item / ks];
        __syncthreads();
        product<true, false>(padded(dk), n, rows, q, ks, grad, ss,
                             [&](int i, int j, float x) { dstate[i * ss + j] = g.carried * dstate[i * ss + j] + x; });
        product<true, false>(padded(dk), n, rows, w, ks, dfresh, ss,
                             [&](int i, int j, float x) { dstate[i * ss + j] -= x; });
        __syncthreads();
    }
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

// The rest of a chunk. Queries' and keys' gradients, of unit rows, go to `work`; values' and the gates' to dc and dp.
// Shared memory: one matrix of the state's shape and four of a chunk's rows, which hold one operand after another.
__global__ void __launch_bounds__(threads) chunks_kernel(Rule r, Src dout, Dst dc, Dst dp) {
    extern __shared__ __align__(16) float memory[];
    __shared__ Gates g;
    __shared__ float dg[rows], dbeta[rows], carried;
    const Place z(r, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), blockIdx.x);
    const int dk = r.s.key_dim, dv = r.s.value_dim, wide = dk > dv ? dk : dv, t = static_cast<int>(threadIdx.x);
    const int ks = stride_of(dk), vs = stride_of(dv), as = stride_of(rows), kp = padded(dk), vp = padded(dv);
    const int size = rows * stride_of(wide), most = padded(dk) > rows ? padded(dk) : rows;
    float *large = memory, *one = large + most * stride_of(wide), *two = one + size, *three = two + size,
          *four = three + size, *square = four + size;
    if (t < rows) dg[t] = dbeta[t] = 0.0f;

    // Keys that the state behind has from here: dk = f V' dS'^T.
    fetch_work(large, z.dstate(), dv, dk);
    fetch_work(four, z.fresh(), dv, rows);
    fetch(three, r.c, dk, z.n, [&](int i) { return z.k(i); });
    fetch(two, r.c, dk, z.n, [&](int i) { return z.q(i); });
    fetch(one, dout, dv, z.n, [&](int i) { return z.o(i); });
    read_gates(z, g);
    to_units(three, dk, 1.0f);
    to_units(two, dk, rsqrtf(static_cast<float>(dk)));
    float sum = 0.0f;
    for (int item = t; item < dk * dv; item += threads) sum += z.state()[item] * large[item / dv * vs + item % dv];
    sum = block_sum(sum);
    if (t == 0) carried = g.carried * sum;
    __syncthreads();
    float behind = 0.0f; // this thread's share of sum k . (f V' dS'^T)
    product<false, true>(rows, kp, dv, four, vs, large, vs, [&](int i, int j, float x) {
        const float value = g.f[i] * x;
        if (j < dk) z.dk()[i * dk + j] = value;
        behind += j < dk ? value * three[i * ks + j] : 0.0f;
    });
    product<false, true>(rows, rows, dv, one, vs, four, vs,
                         [&](int i, int j, float x) { square[i * as + j] = x * between(g, i, j); });
    behind = block_sum(behind);
    __syncthreads();
    if (t == 0) dg[z.n - 1] += carried + behind;
    fetch_work(large, z.state(), dv, dk);
    __syncthreads();

    // Queries, and keys of the scores. `square` holds (do V'^T o D).
    product<false, true>(rows, kp, dv, one, vs, large, vs, [&](int i, int j, float x) {
        if (j < dk) z.dq()[i * dk + j] = g.e[i] * x;
    });
    product<false, false>(rows, kp, rows, square, as, three, ks, [&](int i, int j, float x) {
        if (j < dk) z.dq()[i * dk + j] += x;
    });
    product<true, false>(rows, kp, rows, square, as, two, ks, [&](int i, int j, float x) {
        if (j < dk) z.dk()[i * dk + j] += x;
    });
    __syncthreads(); // All of one, two and square have been read; dq and dk are there for other threads.
    fetch_work(one, z.dq(), dk, rows);
    __syncthreads();
    dots(two, one, ks, dk, [&](int i, float x) { dg[i] += x; });
    __syncthreads();
    fetch_work(one, z.dk(), dk, rows);
    fetch_work(two, z.w(), dk, rows);
    __syncthreads();
    dots(three, one, ks, dk, [&](int i, float x) { dg[i] -= x; });
    // U = V' + W S in place of V'; dX = -dV' S^T by way of W's place in `work`; A.
    product<false, false>(rows, vp, dk, two, ks, large, vs, [&](int i, int j, float x) { four[i * vs + j] += x; });
    __syncthreads();
    fetch_work(one, z.dfresh(), dv, rows);
    product<false, true>(rows, rows, dk, three, ks, three, ks, [&](int i, int j, float x) {
        square[i * as + j] = j < i ? g.beta[i] * x * between(g, i, j) : 0.0f;
    });
    __syncthreads();
    product<false, true>(rows, kp, dv, one, vs, large, vs, [&](int i, int j, float x) {
        if (j < dk) z.w()[i * dk + j] = -x;
    });
    __syncthreads();
    fetch_work(large, z.w(), dk, rows);
    __syncthreads();
    solve<true>(square, as, large, dk, one, dv);
    __syncthreads();

    // `large` holds dX, `one` dY, both behind their systems; square becomes dA o D.
    product<false, true>(rows, rows, dk, large, ks, two, ks, [&](int i, int j, float x) { square[i * as + j] = x; });
    product<false, true>(rows, rows, dv, one, vs, four, vs, [&](int i, int j, float x) {
        square[i * as + j] = j < i ? -(square[i * as + j] + x) * between(g, i, j) : 0.0f;
    });
    __syncthreads();
    fetch(two, r.c, dv, z.n, [&](int i) { return z.v(i); });
    for (int item = t; item < z.n * dv; item += threads) {
        const int i = item / dv, j = item % dv;
        store(dc, z.v(i) + j, g.beta[i] * one[i * vs + j]);
    }
    dots(three, large, ks, dk, [&](int i, float x) {
        dbeta[i] += g.e[i] * x;
        dg[i] += g.beta[i] * g.e[i] * x;
    });
    product<false, false>(rows, kp, rows, square, as, three, ks, [&](int i, int j, float x) {
        four[i * ks + j] = x;
        if (j < dk) z.dk()[i * dk + j] += g.beta[i] * (x + g.e[i] * large[i * ks + j]);
    });
    __syncthreads();
    dots(two, one, vs, dv, [&](int i, float x) { dbeta[i] += x; });
    dots(three, four, ks, dk, [&](int i, float x) {
        dbeta[i] += x;
        dg[i] += g.beta[i] * x;
    });
    for (int item = t; item < rows * as; item += threads) square[item] *= g.beta[item / as];
    __syncthreads();
    product<true, false>(rows, kp, rows, square, as, three, ks, [&](int i, int j, float x) {
        four[i * ks + j] = x;
        if (j < dk) z.dk()[i * dk + j] += x;
    });
    __syncthreads();
    dots(three, four, ks, dk, [&](int i, float x) { dg[i] -= x; });
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

// Gradients of a row's queries and keys over the value heads of a key head, from unit rows to what they were made of.
// A warp for each row and key head; keys behind queries.
__global__ void __launch_bounds__(threads) rows_kernel(Rule r, Dst dc) {
    const std::int64_t item = (std::int64_t{blockIdx.x} * threads + threadIdx.x) / warp_size;
    const int heads = r.s.key_heads, dk = r.s.key_dim, lane = static_cast<int>(threadIdx.x % warp_size);
    if (item >= r.s.rows * heads) return;
    const std::int64_t row = item / heads, at = row / r.s.batch;
    const int head = static_cast<int>(item % heads), b = static_cast<int>(row % r.s.batch);
    for (int part = 0; part < 2; ++part) {
        float x[widest / warp_size], d[widest / warp_size], squares = 0.0f, along = 0.0f;
        const std::int64_t from = row * r.convolved + part * r.keys + head * dk;
#pragma unroll
        for (int u = 0; u < widest / warp_size; ++u) {
            const int j = lane + u * warp_size;
            x[u] = j < dk ? load(r.c, from + j) : 0.0f;
            d[u] = 0.0f;
            for (int h = 0; h < r.share && j < dk; ++h) {
                const Place z(r, b, head * r.share + h, at / rows);
                d[u] += (part == 0 ? z.dq() : z.dk())[at % rows * dk + j];
            }
            squares += x[u] * x[u];
            along += x[u] * d[u];
        }
        const float inverse = rsqrtf(warp_sum(squares) + 1e-6f),
                    scale = part == 0 ? rsqrtf(static_cast<float>(dk)) : 1.0f;
        along = warp_sum(along) * inverse * inverse;
#pragma unroll
        for (int u = 0; u < widest / warp_size; ++u) {
            const int j = lane + u * warp_size;
            if (j < dk) store(dc, from + j, scale * inverse * (d[u] - x[u] * along));
        }
    }
}

// The gradients of a head's weights, summed over sequences and chunks in their order.
__global__ void __launch_bounds__(threads) weights_kernel(Rule r, float* da_log, float* ddt_bias) {
    const int h = static_cast<int>(blockIdx.x);
    float a_log = 0.0f, bias = 0.0f;
    for (std::int64_t i = threadIdx.x; i < r.s.batch * r.chunks; i += threads) {
        const Place z(r, static_cast<int>(i / r.chunks), h, i % r.chunks);
        a_log += z.sums()[0];
        bias += z.sums()[1];
    }
    a_log = block_sum(a_log);
    bias = block_sum(bias);
    if (threadIdx.x != 0) return;
    const int weight = r.s.part * r.s.value_heads + h;
    da_log[weight] += a_log;
    ddt_bias[weight] += bias;
}

void run_plain_grads(const Rule& r, Src dout, Dst dc, Dst dp, cudaStream_t queue) {
    const StateShape& s = r.s;
    const auto bytes = [](int floats) { return static_cast<std::size_t>(floats) * sizeof(float); };
    const int ks = stride_of(s.key_dim), as = stride_of(rows), ss = stride_of(slice);
    const int wide = stride_of(s.key_dim > s.value_dim ? s.key_dim : s.value_dim);
    const int most = padded(s.key_dim) > rows ? padded(s.key_dim) : rows;
    const std::size_t dstates = bytes(rows * (3 * ks + as + 2 * ss) + padded(s.key_dim) * ss),
                      chunks = bytes(most * wide + rows * (4 * wide + as));
    const auto heads = static_cast<unsigned>(s.value_heads), batch = static_cast<unsigned>(s.batch);
    CUDA_CHECK(
        cudaFuncSetAttribute(dstates_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(dstates)));
    dstates_kernel<<<dim3(blocks_for(s.value_dim, slice), heads, batch), threads, dstates, queue>>>(r, dout);
    CUDA_CHECK(cudaGetLastError());
    CUDA_CHECK(
        cudaFuncSetAttribute(chunks_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(chunks)));
    chunks_kernel<<<dim3(static_cast<unsigned>(r.chunks), heads, batch), threads, chunks, queue>>>(r, dout, dc, dp);
    CUDA_CHECK(cudaGetLastError());
}

void delta_rule_grad(const StateShape& s, Src dout, Src c, Src p, Src a_log, Src dt_bias, Dst dc, Dst dp, float* da_log,
                     float* ddt_bias, float* work, void* stream) {
    if (s.rows <= 0) return;
    check_shape(s);
    const Rule r(s, c, p, a_log, dt_bias, work, true);
    cudaStream_t queue = stream_of(stream);
    if (tensor_takes(r, {c, dout, {dc.data, dc.type}})) {
        run_tensor_states(r, {}, queue);
        run_tensor_grads(r, dout, dc, dp, queue);
    } else {
        run_states(r, {}, queue);
        run_plain_grads(r, dout, dc, dp, queue);
        rows_kernel<<<blocks_for(s.rows * s.key_heads, threads / warp_size), threads, 0, queue>>>(r, dc);
    }
    weights_kernel<<<static_cast<unsigned>(s.value_heads), threads, 0, queue>>>(r, da_log, ddt_bias);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace
} // namespace delta

void add_delta_rule_grad(Kernels& table) { table.delta_rule_grad = delta::delta_rule_grad; }

} // namespace moe::cuda
