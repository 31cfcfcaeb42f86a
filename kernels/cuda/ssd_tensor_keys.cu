// The gradients of Mamba-2's keys and values on the tensor cores. Floor: v, gradients and states in, dv out.
#include "kernels/cuda/ssd_tensor_grad.cuh"

namespace moe::cuda::ssd {
namespace {

// dk of a group, dv of its heads, and what keys, values and scores add to the gradients of steps.
template <int DK, int DV>
__global__ void __launch_bounds__(threads, 1) keys_kernel(TensorScan r, Dst dc) {
    using P = KeyParts<DK, DV>;
    using Keys = typename P::Keys;
    using Values = typename P::Values;
    extern __shared__ __align__(128) unsigned char memory[];
    constexpr int across = DV / 16, strips = span / 16, wide = DK / 16;
    const int t = static_cast<int>(threadIdx.x), lane = t % warp_size, mine = rows_of_warp();
    const Share own(r, blockIdx.x);
    const Place z(r, own.b, own.first, own.chunk);
    const unsigned keys = ptx::shared_address(memory), queries = keys + P::keys, stages = queries + P::keys;
    Steps steps(memory + P::steps_at, r.each);
    auto* const sums = reinterpret_cast<float*>(memory + P::sums_at(r.each));
    float *const passed = sums + r.each * warps, *const scores = passed + r.each * warps;
    const bool state_behind = own.chunk + 1 < r.chunks;
    const auto bring = [&](int h) {
        const unsigned at = stages + static_cast<unsigned>(h % P::stages * P::stage);
        Values::load(at, span, r.rows_of_c + z.v(0) + h * r.s.value_dim, r.step_of_c(), z.n, r.s.value_dim);
        Values::load(at + P::values, span, r.rows_of_do + z.o(0) + h * r.s.value_dim, r.step_of_o(), z.n,
                     r.s.value_dim);
        if (state_behind)
            Values::load(at + 2 * P::values, DK, r.behind(own.head(r, h), own.chunk), r.s.value_dim, r.s.key_dim,
                         r.s.value_dim);
        end_group();
    };
    Keys::load(keys, span, r.rows_of_c + z.k(0), r.step_of_c(), z.n, r.s.key_dim);
    Keys::load(queries, span, r.rows_of_c + z.q(0), r.step_of_c(), z.n, r.s.key_dim);
    end_group();
    bring(0);
    steps.read(r, own);
    wait_for_groups<1>();
    __syncthreads();
    const int row = mine * 16 + lane / 4, pair = lane % 4 * 2;
    float raw[strips][2][4] = {}; // k q^T
#pragma unroll
    for (int block = 0; block < wide; ++block) {
        unsigned a[4];
        Keys::left(keys, mine * 16, block, a);
#pragma unroll
        for (int s = 0; s < strips; ++s) {
            if (s < mine) continue;
            unsigned b[4];
            Keys::right(queries, s, block, b);
            multiply(raw[s][0], raw[s][1], a, b);
        }
    }
    float dk[wide][2][4] = {};
    for (int h = 0; h < own.heads; ++h) {
        if (P::stages == 2 && h + 1 < own.heads) {
            bring(h + 1);
            wait_for_groups<1>();
        } else {
            wait_for_groups<0>();
        }
        __syncthreads();
        const unsigned values = stages + static_cast<unsigned>(h % P::stages * P::stage), dout = values + P::values,
                       state = dout + P::values;
        const std::int64_t head = own.head(r, h);
        // A position's sums over all rows that see it; over all columns, a place for each warp.
        float* const of_columns = scores + h % 2 * (warps + 1) * span;
        float* const of_rows = of_columns + warps * span;
        unsigned rows_of_v[across][4];
#pragma unroll
        for (int block = 0; block < across; ++block) Values::left(values, mine * 16, block, rows_of_v[block]);
        const float step[2] = {steps.step[h * span + row], steps.step[h * span + row + 8]};
        float du[across][2][4] = {}, down[2] = {}; // down: of this warp's positions, f k . (u dS^T) and sums of scores
        if (state_behind) {
            const float f[2] = {steps.to_behind(h, row), steps.to_behind(h, row + 8)};
#pragma unroll 4
            for (int block = 0; block < wide; ++block) {
                unsigned a[4];
                Keys::left(keys, mine * 16, block, a);
#pragma unroll
                for (int c = 0; c < across; ++c) {
                    unsigned b[4];
                    Values::right_across(state, c, block, b);
                    multiply(du[c][0], du[c][1], a, b);
                }
            }
#pragma unroll
            for (int c = 0; c < across * 2; ++c)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float2 v = Values::pair(values, row + half * 8, c * 8 + pair);
                    float(&two)[4] = du[c / 2][c % 2];
                    two[half * 2] *= f[half], two[half * 2 + 1] *= f[half];
                    down[half] += v.x * two[half * 2] + v.y * two[half * 2 + 1];
                }
            unsigned u[across][4];
#pragma unroll
            for (int block = 0; block < across; ++block)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float by = f[i % 2] * step[i % 2];
                    u[block][i] = both(low_of(rows_of_v[block][i]) * by, high_of(rows_of_v[block][i]) * by);
                }
#pragma unroll
            for (int block = 0; block < across; ++block)
#pragma unroll
                for (int c = 0; c < wide; ++c) {
                    unsigned b[4];
                    Values::right(state, c, block, b);
                    multiply(dk[c][0], dk[c][1], u[block], b);
                }
        }
        const float forward = step[0] * down[0] + step[1] * down[1]; // of all positions: the last one's
        const float sum[2] = {steps.sum[h * span + row], steps.sum[h * span + row + 8]};
#pragma unroll
        for (int s = 0; s < strips; ++s) {
            if (s < mine) continue;
            float n[2][4] = {};
#pragma unroll
            for (int block = 0; block < across; ++block) {
                unsigned b[4];
                Values::right(dout, s, block, b);
                multiply(n[0], n[1], rows_of_v[block], b);
            }
            unsigned a[4], m[4];
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const int i = s * 16 + part * 8 + pair;
                const float2 sum_i = *reinterpret_cast<const float2*>(steps.sum + h * span + i);
                const int2 first = *reinterpret_cast<const int2*>(steps.first + i);
                float weight[4], column[2] = {};
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int at = i + e % 2, j = row + e / 2 * 8;
                    const bool seen = j <= at && j >= (e % 2 == 0 ? first.x : first.y);
                    const float decay = seen ? power((e % 2 == 0 ? sum_i.x : sum_i.y) - sum[e / 2]) : 0.0f;
                    weight[e] = raw[s][part][e] * decay;
                    const float x = n[part][e] * weight[e];
                    down[e / 2] += x;
                    column[e % 2] += step[e / 2] * x;
                    n[part][e] *= step[e / 2] * decay;
                }
                m[part * 2] = both(weight[0], weight[1]);
                m[part * 2 + 1] = both(weight[2], weight[3]);
                a[part * 2] = both(n[part][0], n[part][1]);
                a[part * 2 + 1] = both(n[part][2], n[part][3]);
#pragma unroll
                for (int offset = 4; offset < warp_size; offset *= 2) {
                    column[0] += __shfl_xor_sync(all_lanes, column[0], offset);
                    column[1] += __shfl_xor_sync(all_lanes, column[1], offset);
                }
                if (lane < 4) *reinterpret_cast<float2*>(of_columns + mine * span + i) = {column[0], column[1]};
            }
#pragma unroll
            for (int c = 0; c < across; ++c) {
                unsigned b[4];
                Values::right_across(dout, c, s, b);
                multiply(du[c][0], du[c][1], m, b);
            }
#pragma unroll
            for (int c = 0; c < wide; ++c) {
                unsigned b[4];
                Keys::right_across(queries, c, s, b);
                multiply(dk[c][0], dk[c][1], a, b);
            }
        }
        const Place to(r, own.b, own.first + h, own.chunk);
        const float skip = load(r.skip, to.weight());
        float skipped = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = row + half * 8;
            float dstep = 0.0f;
#pragma unroll
            for (int c = 0; c < across * 2; ++c) {
                if (c * 8 >= r.s.value_dim) continue;
                const float2 v = Values::pair(values, i, c * 8 + pair), g = Values::pair(dout, i, c * 8 + pair);
                const float(&two)[4] = du[c / 2][c % 2];
                dstep += two[half * 2] * v.x + two[half * 2 + 1] * v.y;
                skipped += g.x * v.x + g.y * v.y;
                if (i < z.n)
                    static_cast<unsigned*>(dc.data)[(to.v(i) + pair) / 2 + c * 4] =
                        both(step[half] * two[half * 2] + skip * g.x, step[half] * two[half * 2 + 1] + skip * g.y);
            }
            dstep = quad_sum(dstep);
            const float of_row = quad_sum(down[half]) * step[half];
            if (lane % 4 == 0) {
                r.vector(TensorScan::of_steps, head, own.chunk)[i] = dstep;
                of_rows[i] = of_row;
            }
        }
        put_sum(sums, h, forward);
        put_sum(passed, h, skipped);
        __syncthreads();
        if (P::stages == 1 && h + 1 < own.heads) bring(h + 1);
        if (t < span) {
            float x = -of_rows[t];
            for (int w = 0; w <= t / 16; ++w) x += of_columns[w * span + t];
            r.vector(TensorScan::of_scores, head, own.chunk)[t] = x;
        } else if (t == span) {
            r.ends[(head * r.chunks + own.chunk) * 2 + 1] = all_warps(sums, h);
        } else if (t == span + warp_size) {
            to.numbers()[3] = all_warps(passed, h);
        }
    }
    write_rows<DK>(r, own, z, 1, dc, dk);
}

} // namespace

void run_tensor_keys(const TensorScan& r, Dst dc, cudaStream_t stream) {
    with_columns(r.s.value_dim, [&]<int DV>() {
        const int bytes = KeyParts<span, DV>::bytes(r.each, key_floats(r.each));
        allow(keys_kernel<span, DV>, bytes);
        keys_kernel<span, DV><<<r.grid(r.chunks), threads, bytes, stream>>>(r, dc);
    });
    CUDA_CHECK(cudaGetLastError());
}

} // namespace moe::cuda::ssd
