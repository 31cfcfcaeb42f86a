// The gradients of Mamba-2: states again, their gradients from the last chunk to the first, then all else of each chunk
// and group at once, and the sums over what shares a head's weights.
//
// Floor: 2.5 times the forward's FLOPs. Formulas are those of kernels/cpu/ssd.cpp; sums over columns of queries and
// keys are sums over columns of values instead: do . (e q S) and u . (f k dS).
#include "kernels/cuda/state/ssd_tensor.hpp"
#include "kernels/cuda/state/ssd_tiles.cuh"

#include "kernels/cuda/families.hpp"

namespace moe::cuda {
namespace ssd {
namespace {

// A chunk's matrices in shared memory, rows * stride each but for the state's slab.
struct Held {
    float *q, *k;    // slabs of queries and keys
    float* state;    // of a state, or of its gradient
    float* raw;      // q k^T of the group
    float* square;   // N of a head, then M
    float* together; // N of all heads
    float *dout, *v, *sum;
    float *dg, *dstep; // [rows]
};

__host__ __device__ inline int held_floats(int dv) {
    return rows * (2 * stride_of(slab) + 3 * stride_of(rows) + 3 * stride_of(dv)) + slab * stride_of(dv) + 2 * rows;
}

__device__ Held hold(float* memory, int dv) {
    const int ks = rows * stride_of(slab), as = rows * stride_of(rows), vs = rows * stride_of(dv);
    Held m;
    m.q = memory, m.k = m.q + ks, m.state = m.k + ks, m.raw = m.state + slab * stride_of(dv), m.square = m.raw + as;
    m.together = m.square + as, m.dout = m.together + as, m.v = m.dout + vs, m.sum = m.v + vs;
    m.dg = m.sum + vs, m.dstep = m.dg + rows;
    return m;
}

// Products of the queries with the state before the chunk, and of the keys with the gradient of the one behind; each
// adds its part to dg, the latter stays in `sum`. The group's gradients of both are set by its first head.
__device__ void grads_by_states(const Scan& r, const Place& z, const Gates& g, const Held& m, bool first_head,
                                float* dq, float* dk) {
    const int dk_columns = r.s.key_dim, dv = r.s.value_dim, vs = stride_of(dv), vp = padded(dv);
    for (int part = 0; part < 2; ++part) { // queries, keys
        float* const rows_of = part == 0 ? m.q : m.k;
        float* const result = part == 0 ? dq : dk;
        for (int first = 0; first < dk_columns; first += slab) {
            const int width = slab_width(r, first), ks = stride_of(width);
            __syncthreads();
            fetch(rows_of, r.c, width, z.n, [&](int i) { return (part == 0 ? z.q(i) : z.k(i)) + first; });
            fetch_work(m.state, (part == 0 ? z.state() : z.dstate()) + first * dv, dv, width);
            __syncthreads();
            product<false, false>(rows, vp, width, rows_of, ks, m.state, vs, [&](int i, int j, float x) {
                m.sum[i * vs + j] = first == 0 ? x : m.sum[i * vs + j] + x;
            });
            product<false, true>(rows, padded(width), dv, part == 0 ? m.dout : m.v, vs, m.state, vs,
                                 [&](int i, int j, float x) {
                                     if (j >= width) return;
                                     float& to = result[i * dk_columns + first + j];
                                     const float own = (part == 0 ? g.e[i] : g.f[i] * g.beta[i]) * x;
                                     to = first_head ? own : to + own;
                                 });
        }
        __syncthreads();
        dots(part == 0 ? m.dout : m.v, m.sum, vs, dv, [&](int i, float x) {
            if (part == 0)
                m.dg[i] = g.e[i] * x;
            else
                m.dstep[i] = g.f[i] * x; // of u, dt still to be multiplied
        });
    }
    __syncthreads();
}

// One block for each chunk and group, head after head.
__global__ void __launch_bounds__(threads) chunks_kernel(Scan r, Src dout, Dst dc, Dst dp) {
    extern __shared__ __align__(16) float memory[];
    __shared__ Gates g;
    const int group = static_cast<int>(blockIdx.y), b = static_cast<int>(blockIdx.z), t = static_cast<int>(threadIdx.x);
    const int dk_columns = r.s.key_dim, dv = r.s.value_dim, vs = stride_of(dv), vp = padded(dv), as = stride_of(rows);
    const Held m = hold(memory, dv);
    const Place all(r, b, group * r.share, blockIdx.x);
    for (int first = 0; first < dk_columns; first += slab) {
        const int width = slab_width(r, first), ks = stride_of(width);
        __syncthreads();
        fetch(m.q, r.c, width, all.n, [&](int i) { return all.q(i) + first; });
        fetch(m.k, r.c, width, all.n, [&](int i) { return all.k(i) + first; });
        __syncthreads();
        product<false, true>(rows, rows, width, m.q, ks, m.k, ks, [&](int i, int j, float x) {
            m.raw[i * as + j] = first == 0 ? x : m.raw[i * as + j] + x;
        });
    }
    for (int head = 0; head < r.share; ++head) {
        const Place z(r, b, group * r.share + head, blockIdx.x);
        __syncthreads();
        read_steps(z, g);
        fetch(m.dout, dout, dv, z.n, [&](int i) { return z.o(i); });
        fetch(m.v, r.c, dv, z.n, [&](int i) { return z.v(i); });
        grads_by_states(r, z, g, m, head == 0, all.dq(), all.dk());
        float behind = 0.0f; // of the last row's sum: what is carried, and all that keys leave
        for (int item = t; item < static_cast<int>(r.size); item += threads)
            behind += g.carried * z.state()[item] * z.dstate()[item];
        if (t < rows) behind += g.beta[t] * m.dstep[t];
        behind = block_sum(behind);
        product<false, true>(rows, rows, dv, m.dout, vs, m.v, vs, [&](int i, int j, float x) {
            const float value = x * g.beta[j] * between(g, i, j);
            m.square[i * as + j] = value;
            m.together[i * as + j] = head == 0 ? value : m.together[i * as + j] + value;
        });
        __syncthreads();
        if (t < rows) {
            float sum = m.dg[t] - g.beta[t] * m.dstep[t] + (t == z.n - 1 ? behind : 0.0f);
            for (int j = 0; j < rows; ++j)
                sum += m.square[t * as + j] * m.raw[t * as + j] - m.square[j * as + t] * m.raw[j * as + t];
            m.dg[t] = sum;
        }
        __syncthreads();
        for (int item = t; item < rows * rows; item += threads) {
            const int i = item / rows, j = item % rows;
            m.square[i * as + j] = m.raw[i * as + j] * between(g, i, j);
        }
        __syncthreads();
        const float skip = load(r.skip, z.weight());
        float passed = 0.0f;
        product<true, false>(rows, vp, rows, m.square, as, m.dout, vs, [&](int i, int j, float x) {
            const float du = x + g.f[i] * m.sum[i * vs + j];
            if (i < z.n && j < dv) {
                store(dc, z.v(i) + j, g.beta[i] * du + skip * m.dout[i * vs + j]);
                passed += m.dout[i * vs + j] * m.v[i * vs + j];
            }
            m.sum[i * vs + j] = du;
        });
        __syncthreads();
        dots(m.v, m.sum, vs, dv, [&](int i, float x) { m.dstep[i] = x; });
        if (t == 0)
            for (int i = z.n - 2; i >= 0; --i) m.dg[i] += m.dg[i + 1]; // from sums within the chunk to g
        __syncthreads();
        float a_log = 0.0f, bias = 0.0f;
        if (t < z.n) {
            const float raw = load(r.p, z.step(t)) + load(r.dt_bias, z.weight()), width = softplus(raw);
            const bool moves = width >= r.s.step_min && width <= r.s.step_max;
            const float dstep = m.dstep[t] - expf(load(r.a_log, z.weight())) * m.dg[t];
            bias = moves ? dstep / (1.0f + expf(-raw)) : 0.0f;
            a_log = m.dg[t] * g.g[t];
            store(dp, z.step(t), bias);
        }
        a_log = block_sum(a_log);
        bias = block_sum(bias);
        passed = block_sum(passed);
        if (t == 0) z.numbers()[1] = a_log, z.numbers()[2] = bias, z.numbers()[3] = passed;
    }
    // Of the scores of all heads.
    for (int first = 0; first < dk_columns; first += slab) {
        const int width = slab_width(r, first), ks = stride_of(width);
        __syncthreads();
        fetch(m.q, r.c, width, all.n, [&](int i) { return all.q(i) + first; });
        fetch(m.k, r.c, width, all.n, [&](int i) { return all.k(i) + first; });
        __syncthreads();
        product<false, false>(rows, padded(width), rows, m.together, as, m.k, ks, [&](int i, int j, float x) {
            if (i < all.n && j < width) store(dc, all.q(i) + first + j, x + all.dq()[i * dk_columns + first + j]);
        });
        product<true, false>(rows, padded(width), rows, m.together, as, m.q, ks, [&](int i, int j, float x) {
            if (i < all.n && j < width) store(dc, all.k(i) + first + j, x + all.dk()[i * dk_columns + first + j]);
        });
    }
}

// The gradients of a head's weights, summed over sequences and chunks in their order.
__global__ void __launch_bounds__(threads) weights_kernel(Scan r, float* da_log, float* ddt_bias, float* dskip) {
    const int h = static_cast<int>(blockIdx.x);
    float a_log = 0.0f, bias = 0.0f, skip = 0.0f;
    for (std::int64_t i = threadIdx.x; i < r.s.batch * r.chunks; i += threads) {
        const Place z(r, static_cast<int>(i / r.chunks), h, i % r.chunks);
        a_log += z.numbers()[1];
        bias += z.numbers()[2];
        skip += z.numbers()[3];
    }
    a_log = block_sum(a_log);
    bias = block_sum(bias);
    skip = block_sum(skip);
    if (threadIdx.x != 0) return;
    const int weight = r.s.part * r.s.value_heads + h;
    da_log[weight] += a_log;
    ddt_bias[weight] += bias;
    dskip[weight] += skip;
}

void ssd_grad(const StateShape& s, Src dout, Src c, Src p, Src a_log, Src dt_bias, Src skip, Dst dc, Dst dp,
              float* da_log, float* ddt_bias, float* dskip, float* work, void* stream) {
    if (s.rows <= 0) return;
    check_shape(s);
    if (tensor_takes(s, true, {c, dout, Src{dc.data, dc.type}}))
        return run_tensor_grads(s, dout, c, p, a_log, dt_bias, skip, dc, dp, da_log, ddt_bias, dskip, work,
                                stream_of(stream));
    const Scan r(s, c, p, a_log, dt_bias, skip, work, true);
    cudaStream_t queue = stream_of(stream);
    run_locals(r, {}, false, queue);
    run_passes(r, false, queue);
    run_locals(r, dout, true, queue);
    run_passes(r, true, queue);
    const auto bytes = static_cast<std::size_t>(held_floats(s.value_dim)) * sizeof(float);
    CUDA_CHECK(
        cudaFuncSetAttribute(chunks_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
    const dim3 grid(static_cast<unsigned>(r.chunks), static_cast<unsigned>(s.key_heads),
                    static_cast<unsigned>(s.batch));
    chunks_kernel<<<grid, threads, bytes, queue>>>(r, dout, dc, dp);
    CUDA_CHECK(cudaGetLastError());
    run_weights(r, da_log, ddt_bias, dskip, queue);
}

} // namespace

void run_weights(const Scan& r, float* da_log, float* ddt_bias, float* dskip, cudaStream_t stream) {
    weights_kernel<<<static_cast<unsigned>(r.s.value_heads), threads, 0, stream>>>(r, da_log, ddt_bias, dskip);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace ssd

void add_ssd_grad(Kernels& table) { table.ssd_grad = ssd::ssd_grad; }

} // namespace moe::cuda
