// The gradients of Mamba-2 on the tensor cores: of a chunk's queries, of its keys and values, then of its steps.
//
// Floor: v, the gradients and of each head and chunk both states read twice, dv written, beside what the states cost.
// Formulas: kernels/cpu/ssd.cpp. Each kernel makes the scores' gradients N of its own rows anew: what is summed over a
// group's heads stays in registers, and no scores go through memory.
#include "kernels/cuda/state/ssd_tensor_grad.cuh"

namespace moe::cuda::ssd {
namespace {

// A warp for a head's steps in a chunk: from sums within the chunk to g, then to dt and its weights.
__global__ void __launch_bounds__(threads) steps_kernel(TensorScan r, Dst dp) {
    constexpr int each = span / warp_size;
    const int lane = static_cast<int>(threadIdx.x) % warp_size,
              h = static_cast<int>(blockIdx.y) * warps + static_cast<int>(threadIdx.x) / warp_size;
    if (h >= r.s.value_heads) return;
    const Place z(r, static_cast<int>(blockIdx.z), h, blockIdx.x);
    const std::int64_t head = std::int64_t{z.b} * r.s.value_heads + h;
    const float *const scores = r.vector(TensorScan::of_scores, head, z.chunk),
                       *const states = r.vector(TensorScan::of_states, head, z.chunk),
                       *const steps = r.vector(TensorScan::of_steps, head, z.chunk),
                       *const ends = r.last_sums(head, z.chunk);
    float dg[each], total = 0.0f, last = ends[r.halves];
    for (int half = 0; half < r.halves; ++half) last += ends[half];
#pragma unroll
    for (int u = each - 1; u >= 0; --u) {
        const int i = lane * each + u;
        if (i < z.n) total += scores[i] + states[i] + (i == z.n - 1 ? last : 0.0f);
        if (i < z.n && r.halves > 1) total += r.vector(TensorScan::of_states + 1, head, z.chunk)[i];
        dg[u] = total;
    }
    float behind = total;
#pragma unroll
    for (int offset = 1; offset < warp_size; offset *= 2) {
        const float x = __shfl_down_sync(all_lanes, behind, offset);
        if (lane + offset < warp_size) behind += x;
    }
    behind -= total;
    const float rate = expf(load(r.a_log, z.weight())), shift = load(r.dt_bias, z.weight());
    float a_log = 0.0f, bias = 0.0f;
#pragma unroll
    for (int u = 0; u < each; ++u) {
        const int i = lane * each + u;
        if (i >= z.n) continue;
        const float x = load(r.p, z.step(i)) + shift, width = softplus(x), g = dg[u] + behind;
        const bool moves = width >= r.s.step_min && width <= r.s.step_max;
        const float dstep = moves ? (steps[i] - rate * g) / (1.0f + expf(-x)) : 0.0f;
        store(dp, z.step(i), dstep);
        bias += dstep;
        a_log -= g * rate * fminf(fmaxf(width, r.s.step_min), r.s.step_max);
    }
    a_log = warp_sum(a_log);
    bias = warp_sum(bias);
    if (lane == 0) z.numbers()[1] = a_log, z.numbers()[2] = bias;
}

// A thread for two neighbouring columns: the sums of a group's blocks, in their order.
__global__ void __launch_bounds__(threads) sums_kernel(TensorScan r, Dst dc) {
    const std::int64_t pairs = std::int64_t{span} * r.s.key_dim / 2, all = r.partial_size() / 2;
    for (std::int64_t item = std::int64_t{blockIdx.x} * threads + threadIdx.x; item < all;
         item += std::int64_t{gridDim.x} * threads) {
        const int i = static_cast<int>(item % pairs) / (r.s.key_dim / 2),
                  column = static_cast<int>(item % pairs) % (r.s.key_dim / 2) * 2;
        const std::int64_t place = item / pairs, chunk = place / 2 % r.chunks, group = place / 2 / r.chunks;
        const Place z(r, static_cast<int>(group / r.s.key_heads), static_cast<int>(group % r.s.key_heads) * r.share,
                      chunk);
        if (i >= z.n) continue;
        float2 sum{0.0f, 0.0f};
        for (int part = 0; part < r.parts; ++part) {
            const float2 x = reinterpret_cast<const float2*>(r.partials)[part * all + item];
            sum.x += x.x, sum.y += x.y;
        }
        static_cast<unsigned*>(dc.data)[((place % 2 == 0 ? z.q(i) : z.k(i)) + column) / 2] = both(sum.x, sum.y);
    }
}

} // namespace

void run_tensor_grads(const StateShape& s, Src dout, Src c, Src p, Src a_log, Src dt_bias, Src skip, Dst dc, Dst dp,
                      float* da_log, float* ddt_bias, float* dskip, float* work, cudaStream_t stream) {
    const TensorScan r(s, c, p, a_log, dt_bias, skip, dout, work, true);
    run_tensor_states(r, true, stream);
    run_tensor_queries(r, dc, stream);
    run_tensor_keys(r, dc, stream);
    if (r.parts > 1) {
        sums_kernel<<<blocks_for(r.partial_size() / 2, threads), threads, 0, stream>>>(r, dc);
        CUDA_CHECK(cudaGetLastError());
    }
    const dim3 grid(static_cast<unsigned>(r.chunks), blocks_for(s.value_heads, warps), static_cast<unsigned>(s.batch));
    steps_kernel<<<grid, threads, 0, stream>>>(r, dp);
    CUDA_CHECK(cudaGetLastError());
    run_weights(r, da_log, ddt_bias, dskip, stream);
}

} // namespace moe::cuda::ssd
