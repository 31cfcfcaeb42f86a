// Mamba-2 forward: what each chunk leaves in a state, states from chunk to chunk, then the outputs of all chunks at
// once.
//
// Floor: the products of kernels/kernel_args.hpp's formulas in FP32, 2 (2 dk dv + 32 (dk + dv)) FLOPs for each token
// and head, or q, k, v and the steps in and o out. Products are of FP32 whatever the operands are stored in.
#include "kernels/cuda/state/ssd_tensor.hpp"
#include "kernels/cuda/state/ssd_tiles.cuh"

#include "kernels/cuda/families.hpp"

namespace moe::cuda {
namespace ssd {
namespace {

// Shared memory: a slab of queries or keys, and values or gradients, rows * stride each.
__global__ void __launch_bounds__(threads) locals_kernel(Scan r, Src dout, bool grad) {
    extern __shared__ __align__(16) float memory[];
    __shared__ Gates g;
    const Place z(r, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), blockIdx.x);
    const int dv = r.s.value_dim, vs = stride_of(dv);
    float *k = memory, *v = k + rows * stride_of(slab);
    read_steps(z, g);
    if (grad)
        fetch(v, dout, dv, z.n, [&](int i) { return z.o(i); });
    else
        fetch(v, r.c, dv, z.n, [&](int i) { return z.v(i); });
    float* const out = grad ? z.dstate() : z.state();
    for (int first = 0; first < r.s.key_dim; first += slab) {
        const int width = slab_width(r, first), ks = stride_of(width);
        __syncthreads();
        fetch(k, r.c, width, z.n, [&](int i) { return (grad ? z.q(i) : z.k(i)) + first; });
        __syncthreads();
        for (int item = static_cast<int>(threadIdx.x); item < rows * ks; item += threads)
            k[item] *= grad ? g.e[item / ks] : g.f[item / ks] * g.beta[item / ks];
        __syncthreads();
        product<true, false>(padded(width), padded(dv), rows, k, ks, v, vs, [&](int i, int j, float x) {
            if (i < width && j < dv) out[(first + i) * dv + j] = x;
        });
    }
    if (!grad && threadIdx.x == 0) z.numbers()[0] = g.carried;
}

// A thread for each element of a head's state.
__global__ void __launch_bounds__(threads) passes_kernel(Scan r, bool grad) {
    const std::int64_t element = std::int64_t{blockIdx.x} * threads + threadIdx.x;
    if (element >= r.size) return;
    float passed = 0.0f;
    for (std::int64_t i = 0; i < r.chunks; ++i) {
        const Place z(r, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), grad ? r.chunks - 1 - i : i);
        float* const here = (grad ? z.dstate() : z.state()) + element;
        const float own = *here;
        *here = passed;
        passed = z.numbers()[0] * passed + own;
    }
}

// Shared memory: slabs of queries and keys, a slab of the state, values, what is put out, and the scores.
__global__ void __launch_bounds__(threads) outputs_kernel(Scan r, Dst o) {
    extern __shared__ __align__(16) float memory[];
    __shared__ Gates g;
    const Place z(r, static_cast<int>(blockIdx.z), static_cast<int>(blockIdx.y), blockIdx.x);
    const int dv = r.s.value_dim, vs = stride_of(dv), vp = padded(dv), as = stride_of(rows);
    float *q = memory, *k = q + rows * stride_of(slab), *state = k + rows * stride_of(slab), *v = state + slab * vs,
          *out = v + rows * vs, *scores = out + rows * vs;
    read_steps(z, g);
    fetch(v, r.c, dv, z.n, [&](int i) { return z.v(i); });
    for (int first = 0; first < r.s.key_dim; first += slab) {
        const int width = slab_width(r, first), ks = stride_of(width);
        __syncthreads();
        fetch(q, r.c, width, z.n, [&](int i) { return z.q(i) + first; });
        fetch(k, r.c, width, z.n, [&](int i) { return z.k(i) + first; });
        fetch_work(state, z.state() + first * dv, dv, width);
        __syncthreads();
        // The same thread adds all parts of an element.
        product<false, true>(rows, rows, width, q, ks, k, ks, [&](int i, int j, float x) {
            scores[i * as + j] = first == 0 ? x : scores[i * as + j] + x;
        });
        product<false, false>(rows, vp, width, q, ks, state, vs,
                              [&](int i, int j, float x) { out[i * vs + j] = first == 0 ? x : out[i * vs + j] + x; });
    }
    __syncthreads();
    for (int item = static_cast<int>(threadIdx.x); item < rows * rows; item += threads) {
        const int i = item / rows, j = item % rows;
        scores[i * as + j] *= between(g, i, j) * g.beta[j];
    }
    __syncthreads();
    const float skip = load(r.skip, z.weight());
    product<false, false>(rows, vp, rows, scores, as, v, vs, [&](int i, int j, float x) {
        if (i < z.n && j < dv) store(o, z.o(i) + j, g.e[i] * out[i * vs + j] + x + skip * v[i * vs + j]);
    });
}

std::size_t bytes_of(int floats) { return static_cast<std::size_t>(floats) * sizeof(float); }

} // namespace

void check_shape(const StateShape& s) {
    require(s.value_dim <= delta::widest, "columns of a head of Mamba-2", s.value_dim, delta::widest);
    require(s.batch <= 65535, "sequences of Mamba-2", s.batch, 65535);
}

void run_locals(const Scan& r, Src dout, bool grad, cudaStream_t stream) {
    const std::size_t bytes = bytes_of(rows * (stride_of(slab) + stride_of(r.s.value_dim)));
    CUDA_CHECK(
        cudaFuncSetAttribute(locals_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
    const dim3 grid(static_cast<unsigned>(r.chunks), static_cast<unsigned>(r.s.value_heads),
                    static_cast<unsigned>(r.s.batch));
    locals_kernel<<<grid, threads, bytes, stream>>>(r, dout, grad);
    CUDA_CHECK(cudaGetLastError());
}

void run_passes(const Scan& r, bool grad, cudaStream_t stream) {
    const dim3 grid(blocks_for(r.size, threads), static_cast<unsigned>(r.s.value_heads),
                    static_cast<unsigned>(r.s.batch));
    passes_kernel<<<grid, threads, 0, stream>>>(r, grad);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace ssd

namespace {

void ssd_forward(const StateShape& s, Src c, Src p, Src a_log, Src dt_bias, Src skip, Dst o, float* work,
                 void* stream) {
    if (s.rows <= 0) return;
    ssd::check_shape(s);
    if (ssd::tensor_takes(s, false, {c, Src{o.data, o.type}}))
        return ssd::run_tensor(s, c, p, a_log, dt_bias, skip, o, work, stream_of(stream));
    const ssd::Scan r(s, c, p, a_log, dt_bias, skip, work, false);
    cudaStream_t queue = stream_of(stream);
    ssd::run_locals(r, {}, false, queue);
    ssd::run_passes(r, false, queue);
    using ssd::rows, ssd::slab, ssd::stride_of;
    const int vs = stride_of(s.value_dim);
    const auto bytes =
        static_cast<std::size_t>(rows * (2 * stride_of(slab) + 2 * vs + stride_of(rows)) + slab * vs) * sizeof(float);
    CUDA_CHECK(cudaFuncSetAttribute(ssd::outputs_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(bytes)));
    const dim3 grid(static_cast<unsigned>(r.chunks), static_cast<unsigned>(s.value_heads),
                    static_cast<unsigned>(s.batch));
    ssd::outputs_kernel<<<grid, ssd::threads, bytes, queue>>>(r, o);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_ssd(Kernels& table) {
    table.ssd = ssd_forward;
    add_ssd_grad(table);
}

} // namespace moe::cuda
