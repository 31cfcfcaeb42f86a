// The gradients of Mamba-2's queries on the tensor cores. Floor: v, gradients and states of all heads in, queries once.
#include "kernels/cuda/state/ssd_tensor_grad.cuh"

namespace moe::cuda::ssd {
namespace {

using Keys = Tile<span>;
template <int DV>
using QueryParts = Parts<Keys::bytes(span) + all_strips * operand_bytes, span, DV>;

// dq of a group, `span` of its columns, and what these and states add to the gradients of steps.
template <int DV>
__global__ void __launch_bounds__(all_threads, 1) queries_kernel(TensorScan r, Dst dc) {
    using P = QueryParts<DV>;
    using Values = typename P::Values;
    extern __shared__ __align__(128) unsigned char memory[];
    constexpr int across = DV / 16, own_wide = wide / 2;
    const int half = static_cast<int>(blockIdx.z / r.s.batch), columns = half * span, // the first
        width = min(span, r.s.key_dim - columns), before = columns * r.s.value_dim;
    const int t = static_cast<int>(threadIdx.x), lane = t % warp_size, mine = rows_of_warp(), side = t / threads;
    const Share own(r, blockIdx.x);
    const Place z(r, own.b, own.first, own.chunk);
    const unsigned keys = ptx::shared_address(memory), stages = keys + Keys::bytes(span) + all_strips * operand_bytes;
    // Strip s of these positions, s <= mine.
    const unsigned operands =
        keys + Keys::bytes(span) + static_cast<unsigned>(lane * 16 + mine * (mine + 1) / 2 * operand_bytes);
    Steps steps(memory + P::steps_at, r.each);
    auto* const sums = reinterpret_cast<float*>(memory + P::sums_at(r.each));
    float* const of_states = sums + r.each * 2 * pairs; // of each side's columns
    const bool state_before = own.chunk > 0, state_behind = own.chunk + 1 < r.chunks;
    const auto bring = [&](int h) {
        const unsigned at = stages + static_cast<unsigned>(h % P::stages * P::stage);
        Values::template load<all_threads>(at, span, r.rows_of_c + z.v(0) + h * r.s.value_dim, r.step_of_c(), z.n,
                                           r.s.value_dim);
        Values::template load<all_threads>(at + P::values, span, r.rows_of_do + z.o(0) + h * r.s.value_dim,
                                           r.step_of_o(), z.n, r.s.value_dim);
        if (state_before)
            Values::template load<all_threads>(at + 2 * P::values, span, r.before(own.head(r, h), own.chunk) + before,
                                               r.s.value_dim, width, r.s.value_dim);
        end_group();
    };
    Keys::load<all_threads>(keys, span, r.rows_of_c + z.k(0) + columns, r.step_of_c(), z.n, width);
    bring(0);
    steps.read(r, own);
    const int row = mine * 16 + lane / 4, pair = lane % 4 * 2;
    unsigned queries[own_wide][4]; // as a product's sums have them
#pragma unroll
    for (int c = 0; c < own_wide * 2; ++c)
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const int i = row + part * 8, column = side * span / 2 + c * 8 + pair;
            queries[c / 2][c % 2 * 2 + part] =
                i < z.n && column < width ? *reinterpret_cast<const unsigned*>(r.rows_of_c + z.q(i) + columns + column)
                                          : 0u;
        }
    float dq[own_wide][2][4] = {};
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
        unsigned rows_of_do[across][4];
#pragma unroll
        for (int block = 0; block < across; ++block) Values::left(dout, mine * 16, block, rows_of_do[block]);
        const float sum[2] = {steps.sum[h * span + row], steps.sum[h * span + row + 8]};
        const int first[2] = {steps.first[row], steps.first[row + 8]};
#pragma unroll 1
        for (int s = side; s <= mine; s += 2) {
            float n[2][4] = {};
#pragma unroll
            for (int block = 0; block < across; ++block) {
                unsigned b[4];
                Values::right(values, s, block, b);
                multiply(n[0], n[1], rows_of_do[block], b);
            }
            unsigned a[4];
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const int j = s * 16 + part * 8 + pair;
                const float2 sum_j = *reinterpret_cast<const float2*>(steps.sum + h * span + j),
                             step = *reinterpret_cast<const float2*>(steps.step + h * span + j);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int at = j + i % 2;
                    const bool seen = at <= row + i / 2 * 8 && at >= first[i / 2];
                    const float decay = power(sum[i / 2] - (i % 2 == 0 ? sum_j.x : sum_j.y));
                    n[part][i] = seen ? n[part][i] * decay * (i % 2 == 0 ? step.x : step.y) : 0.0f;
                }
                a[part * 2] = both(n[part][0], n[part][1]);
                a[part * 2 + 1] = both(n[part][2], n[part][3]);
            }
            put_operand(operands + static_cast<unsigned>(s * operand_bytes), a);
        }
        float dots[2] = {};
        if (state_before) {
            const float e[2] = {steps.from_before(h, row), steps.from_before(h, row + 8)};
#pragma unroll
            for (int c = 0; c < own_wide; ++c) {
                float back[2][4] = {}; // do S^T
#pragma unroll
                for (int block = 0; block < across; ++block) {
                    unsigned b[4];
                    Values::right(state, side * own_wide + c, block, b);
                    multiply(back[0], back[1], rows_of_do[block], b);
                }
#pragma unroll
                for (int part = 0; part < 2; ++part)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const unsigned q = queries[c][part * 2 + i / 2];
                        const float x = e[i / 2] * back[part][i];
                        dots[i / 2] += x * (i % 2 == 0 ? low_of(q) : high_of(q));
                        dq[c][part][i] += x;
                    }
            }
        }
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            const float dot = quad_sum(dots[part]);
            if (lane % 4 == 0) of_states[side * span + row + part * 8] = dot;
        }
        meet(mine);
#pragma unroll 2
        for (int s = 0; s <= mine; ++s) {
            unsigned a[4];
            take_operand(operands + static_cast<unsigned>(s * operand_bytes), a);
#pragma unroll
            for (int c = 0; c < own_wide; ++c) {
                unsigned b[4];
                Keys::right_across(keys, side * own_wide + c, s, b);
                multiply(dq[c][0], dq[c][1], a, b);
            }
        }
        // What is carried of the state behind the chunk, with its gradient.
        float carried = 0.0f;
        if (state_before && state_behind) {
            const Element* const behind = r.behind(head, own.chunk) + before;
            constexpr int packs = DV / pack;
            for (int item = t; item < width * packs; item += all_threads) {
                const int i = item / packs, j = item % packs;
                if (j * pack >= r.s.value_dim) continue;
                const uint4 x = *reinterpret_cast<const uint4*>(behind + i * r.s.value_dim + j * pack);
                uint4 y;
                asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w)
                             : "r"(Values::at(state, i, j)));
                carried += low_of(x.x) * low_of(y.x) + high_of(x.x) * high_of(y.x) + low_of(x.y) * low_of(y.y) +
                           high_of(x.y) * high_of(y.y) + low_of(x.z) * low_of(y.z) + high_of(x.z) * high_of(y.z) +
                           low_of(x.w) * low_of(y.w) + high_of(x.w) * high_of(y.w);
            }
            carried *= steps.from_before(h, z.n - 1);
        }
        put_sum<2 * pairs>(sums, h, carried);
        __syncthreads();
        if (P::stages == 1 && h + 1 < own.heads) bring(h + 1);
        if (t < span)
            r.vector(TensorScan::of_states + half, head, own.chunk)[t] = of_states[t] + of_states[span + t];
        else if (t == span)
            r.last_sums(head, own.chunk)[half] = all_warps<2 * pairs>(sums, h);
    }
    write_rows(r, own, z, 0, columns + side * span / 2, dc, dq);
}

} // namespace

void run_tensor_queries(const TensorScan& r, Dst dc, cudaStream_t stream) {
    with_columns(r.s.value_dim, [&]<int DV>() {
        const int bytes = QueryParts<DV>::bytes(r.each, query_floats(r.each));
        allow(queries_kernel<DV>, bytes);
        queries_kernel<DV><<<r.grid(r.chunks, r.halves), all_threads, bytes, stream>>>(r, dc);
    });
    CUDA_CHECK(cudaGetLastError());
}

} // namespace moe::cuda::ssd
