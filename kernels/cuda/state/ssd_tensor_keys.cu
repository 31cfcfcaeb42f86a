// The gradients of Mamba-2's keys and values on the tensor cores. Floor: v, gradients and states in, dv out.
#include "kernels/cuda/state/ssd_tensor_grad.cuh"

namespace moe::cuda::ssd {
namespace {

constexpr int strip_bytes = 2 * operand_bytes; // of two products

// All columns of keys | `span` columns of queries | of every strip operands of two products.
template <int DK, int DV>
struct KeyParts : Parts<Tile<DK>::bytes(span) + Tile<span>::bytes(span) + all_strips * strip_bytes, DK, DV> {
    static constexpr int queries_at = Tile<DK>::bytes(span), strips_at = queries_at + Tile<span>::bytes(span),
                         stages_at = strips_at + all_strips * strip_bytes;
};

// The sums of a strip's 16 columns over a warp's rows go to out[16].
__device__ inline void put_columns(const float (&column)[2][2], float* out) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    const bool second = lane & 16, odd = lane & 8;
    float of_part[2];
#pragma unroll
    for (int e = 0; e < 2; ++e)
        of_part[e] = (second ? column[1][e] : column[0][e]) +
                     __shfl_xor_sync(all_lanes, second ? column[0][e] : column[1][e], 16);
    float sum = (odd ? of_part[1] : of_part[0]) + __shfl_xor_sync(all_lanes, odd ? of_part[0] : of_part[1], 8);
    sum += __shfl_xor_sync(all_lanes, sum, 4);
    if ((lane & 4) == 0) out[(second ? 8 : 0) + lane % 4 * 2 + (odd ? 1 : 0)] = sum;
}

// dk of a group, its first `span` columns, dv of its heads, and what keys, values and scores add to the gradients of
// steps. DK: columns of keys.
template <int DK, int DV>
__global__ void __launch_bounds__(all_threads, 1) keys_kernel(TensorScan r, Dst dc) {
    using P = KeyParts<DK, DV>;
    using Keys = Tile<DK>;
    using Queries = Tile<span>;
    using Values = typename P::Values;
    extern __shared__ __align__(128) unsigned char memory[];
    constexpr int across = DV / 16, pieces = across; // of 16 columns; of eight, of each side
    constexpr int own_wide = wide / 2, halves = DK / span;
    const int t = static_cast<int>(threadIdx.x), lane = t % warp_size, mine = rows_of_warp(), side = t / threads;
    const Share own(r, blockIdx.x);
    const Place z(r, own.b, own.first, own.chunk);
    const unsigned keys = ptx::shared_address(memory), queries = keys + P::queries_at, stages = keys + P::stages_at;
    // Strip s of these positions, s >= mine.
    const unsigned operands = keys + P::strips_at + static_cast<unsigned>(lane * 16) +
                              static_cast<unsigned>((mine * (2 * strips + 1 - mine) / 2 - mine) * strip_bytes);
    Steps steps(memory + P::steps_at, r.each);
    auto* const sums = reinterpret_cast<float*>(memory + P::sums_at(r.each));
    // Sums over all rows that see a position, a place for each pair; of each side over all columns, and of dt.
    float *const passed = sums + r.each * 2 * pairs, *const of_columns = passed + r.each * 2 * pairs,
                 *const of_rows = of_columns + pairs * span, *const of_dt = of_rows + 2 * span;
    const bool state_behind = own.chunk + 1 < r.chunks;
    const auto bring = [&](int h) {
        const unsigned at = stages + static_cast<unsigned>(h % P::stages * P::stage);
        Values::template load<all_threads>(at, span, r.rows_of_c + z.v(0) + h * r.s.value_dim, r.step_of_c(), z.n,
                                           r.s.value_dim);
        Values::template load<all_threads>(at + P::values, span, r.rows_of_do + z.o(0) + h * r.s.value_dim,
                                           r.step_of_o(), z.n, r.s.value_dim);
        if (state_behind)
            Values::template load<all_threads>(at + 2 * P::values, DK, r.behind(own.head(r, h), own.chunk),
                                               r.s.value_dim, r.s.key_dim, r.s.value_dim);
        end_group();
    };
    const auto bring_queries = [&](int half) {
        Queries::template load<all_threads>(queries, span, r.rows_of_c + z.q(0) + half * span, r.step_of_c(), z.n,
                                            r.s.key_dim - half * span);
        end_group();
    };
    Keys::template load<all_threads>(keys, span, r.rows_of_c + z.k(0), r.step_of_c(), z.n, r.s.key_dim);
    bring_queries(halves - 1);
    bring(0);
    steps.read(r, own);
    wait_for_groups<1>();
    __syncthreads();
    const int row = mine * 16 + lane / 4, pair = lane % 4 * 2;
    float raw[strips / 2][2][4] = {}; // k q^T
#pragma unroll
    for (int half = halves - 1; half >= 0; --half) {
        if (half < halves - 1) {
            __syncthreads();
            bring_queries(half);
            wait_for_groups<0>();
            __syncthreads();
        }
#pragma unroll
        for (int block = 0; block < wide; ++block) {
            unsigned a[4];
            Keys::left(keys, mine * 16, half * wide + block, a);
#pragma unroll
            for (int i = 0; i < strips / 2; ++i) {
                const int s = mine + side + i * 2;
                if (s >= strips) continue;
                unsigned b[4];
                Queries::right(queries, s, block, b);
                multiply(raw[i][0], raw[i][1], a, b);
            }
        }
    }
    float dk[own_wide][2][4] = {};
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
        const float step[2] = {steps.step[h * span + row], steps.step[h * span + row + 8]};
        const float sum[2] = {steps.sum[h * span + row], steps.sum[h * span + row + 8]};
        float down[2] = {}; // sums of scores of this thread's positions
        {
            unsigned rows_of_v[across][4];
#pragma unroll
            for (int block = 0; block < across; ++block) Values::left(values, mine * 16, block, rows_of_v[block]);
#pragma unroll 1
            for (int s = mine + side; s < strips; s += 2) {
                const int place = (s - mine) / 2;
                float n[2][4] = {}, column[2][2] = {};
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
                    float weight[4];
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int at = i + e % 2, j = row + e / 2 * 8;
                        const bool seen = j <= at && j >= (e % 2 == 0 ? first.x : first.y);
                        const float decay = seen ? power((e % 2 == 0 ? sum_i.x : sum_i.y) - sum[e / 2]) : 0.0f;
                        weight[e] = of_strip(raw, place, part, e) * decay;
                        const float x = n[part][e] * weight[e];
                        down[e / 2] += x;
                        column[part][e % 2] += step[e / 2] * x;
                        n[part][e] *= step[e / 2] * decay;
                    }
                    m[part * 2] = both(weight[0], weight[1]);
                    m[part * 2 + 1] = both(weight[2], weight[3]);
                    a[part * 2] = both(n[part][0], n[part][1]);
                    a[part * 2 + 1] = both(n[part][2], n[part][3]);
                }
                put_operand(operands + static_cast<unsigned>(s * strip_bytes), m);
                put_operand(operands + static_cast<unsigned>(s * strip_bytes + operand_bytes), a);
                put_columns(column, of_columns + mine * span + s * 16);
            }
        }
        float du[pieces][4] = {}, forward = 0.0f; // forward: f k . (u dS^T), of all positions the last one's
        if (state_behind) {
            const float f[2] = {steps.to_behind(h, row), steps.to_behind(h, row + 8)};
#pragma unroll 4
            for (int block = 0; block < DK / 16; ++block) {
                unsigned a[4];
                Keys::left(keys, mine * 16, block, a);
                multiply_pieces<Values>(du, a, state, side, block);
            }
            float left[2] = {};
#pragma unroll
            for (int c = 0; c < pieces; ++c)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const float2 v = Values::pair(values, row + half * 8, piece_of<pieces>(side, c) * 8 + pair);
                    du[c][half * 2] *= f[half], du[c][half * 2 + 1] *= f[half];
                    left[half] += v.x * du[c][half * 2] + v.y * du[c][half * 2 + 1];
                }
            forward = step[0] * left[0] + step[1] * left[1];
            down[0] += left[0], down[1] += left[1];
            const float by[2] = {f[0] * step[0], f[1] * step[1]};
#pragma unroll
            for (int block = 0; block < across; ++block) {
                unsigned rows_of_v[4], u[4];
                Values::left(values, mine * 16, block, rows_of_v);
                scale_rows(rows_of_v, by, u);
#pragma unroll
                for (int c = 0; c < own_wide; ++c) {
                    unsigned b[4];
                    Values::right(state, side * own_wide + c, block, b);
                    multiply(dk[c][0], dk[c][1], u, b);
                }
            }
        }
        meet(mine);
#pragma unroll 2
        for (int s = mine; s < strips; ++s) {
            unsigned a[4], m[4];
            take_operand(operands + static_cast<unsigned>(s * strip_bytes), m);
            take_operand(operands + static_cast<unsigned>(s * strip_bytes + operand_bytes), a);
            multiply_pieces<Values>(du, m, dout, side, s);
#pragma unroll
            for (int c = 0; c < own_wide; ++c) {
                unsigned b[4];
                Queries::right_across(queries, side * own_wide + c, s, b);
                multiply(dk[c][0], dk[c][1], a, b);
            }
        }
        const Place to(r, own.b, own.first + h, own.chunk);
        const float skip = load(r.skip, to.weight());
        float skipped = 0.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = row + half * 8;
            unsigned* const out = static_cast<unsigned*>(dc.data) + (to.v(i) + pair) / 2;
            float dstep = 0.0f;
#pragma unroll
            for (int c = 0; c < pieces; ++c) {
                const int column = piece_of<pieces>(side, c) * 8;
                if (column >= r.s.value_dim) continue;
                const float2 v = Values::pair(values, i, column + pair), g = Values::pair(dout, i, column + pair);
                const float low = du[c][half * 2], high = du[c][half * 2 + 1];
                dstep += low * v.x + high * v.y;
                skipped += g.x * v.x + g.y * v.y;
                if (i < z.n) out[column / 2] = both(step[half] * low + skip * g.x, step[half] * high + skip * g.y);
            }
            dstep = quad_sum(dstep);
            const float of_row = quad_sum(down[half]) * step[half];
            if (lane % 4 == 0) of_dt[side * span + i] = dstep, of_rows[side * span + i] = of_row;
        }
        put_sum<2 * pairs>(sums, h, forward);
        put_sum<2 * pairs>(passed, h, skipped);
        __syncthreads();
        if (P::stages == 1 && h + 1 < own.heads) bring(h + 1);
        const std::int64_t head = own.head(r, h);
        if (t < span) {
            float x = -(of_rows[t] + of_rows[span + t]);
            for (int w = 0; w <= t / 16; ++w) x += of_columns[w * span + t];
            r.vector(TensorScan::of_scores, head, own.chunk)[t] = x;
        } else if (t < 2 * span) {
            r.vector(TensorScan::of_steps, head, own.chunk)[t - span] = of_dt[t - span] + of_dt[t];
        } else if (t == 2 * span) {
            r.last_sums(head, own.chunk)[r.halves] = all_warps<2 * pairs>(sums, h);
        } else if (t == 2 * span + warp_size) {
            to.numbers()[3] = all_warps<2 * pairs>(passed, h);
        }
    }
    write_rows(r, own, z, 1, side * span / 2, dc, dk);
}

template <int DV>
using RestParts = Parts<Tile<span>::bytes(span), span, DV>;

// dk of a group, columns behind the first `span`.
template <int DV>
__global__ void __launch_bounds__(threads, 1) rest_kernel(TensorScan r, Dst dc) {
    using P = RestParts<DV>;
    using Queries = Tile<span>;
    using Values = typename P::Values;
    extern __shared__ __align__(128) unsigned char memory[];
    constexpr int across = DV / 16;
    const int lane = static_cast<int>(threadIdx.x) % warp_size, mine = rows_of_warp(), width = r.s.key_dim - span;
    const Share own(r, blockIdx.x);
    const Place z(r, own.b, own.first, own.chunk);
    const unsigned queries = ptx::shared_address(memory), stages = queries + Queries::bytes(span);
    Steps steps(memory + P::steps_at, r.each);
    const bool state_behind = own.chunk + 1 < r.chunks;
    const auto bring = [&](int h) {
        const unsigned at = stages + static_cast<unsigned>(h % P::stages * P::stage);
        Values::load(at, span, r.rows_of_c + z.v(0) + h * r.s.value_dim, r.step_of_c(), z.n, r.s.value_dim);
        Values::load(at + P::values, span, r.rows_of_do + z.o(0) + h * r.s.value_dim, r.step_of_o(), z.n,
                     r.s.value_dim);
        if (state_behind)
            Values::load(at + 2 * P::values, span, r.behind(own.head(r, h), own.chunk) + span * r.s.value_dim,
                         r.s.value_dim, width, r.s.value_dim);
        end_group();
    };
    Queries::load(queries, span, r.rows_of_c + z.q(0) + span, r.step_of_c(), z.n, width);
    bring(0);
    steps.read(r, own);
    const int row = mine * 16 + lane / 4, pair = lane % 4 * 2;
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
        unsigned rows_of_v[across][4];
#pragma unroll
        for (int block = 0; block < across; ++block) Values::left(values, mine * 16, block, rows_of_v[block]);
        const float step[2] = {steps.step[h * span + row], steps.step[h * span + row + 8]};
        if (state_behind) {
            const float by[2] = {step[0] * steps.to_behind(h, row), step[1] * steps.to_behind(h, row + 8)};
#pragma unroll
            for (int block = 0; block < across; ++block) {
                unsigned u[4];
                scale_rows(rows_of_v[block], by, u);
#pragma unroll
                for (int c = 0; c < wide; ++c) {
                    unsigned b[4];
                    Values::right(state, c, block, b);
                    multiply(dk[c][0], dk[c][1], u, b);
                }
            }
        }
        const float sum[2] = {steps.sum[h * span + row], steps.sum[h * span + row + 8]};
#pragma unroll 1
        for (int s = mine; s < strips; ++s) {
            float n[2][4] = {};
#pragma unroll
            for (int block = 0; block < across; ++block) {
                unsigned b[4];
                Values::right(dout, s, block, b);
                multiply(n[0], n[1], rows_of_v[block], b);
            }
            unsigned a[4];
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const int i = s * 16 + part * 8 + pair;
                const float2 sum_i = *reinterpret_cast<const float2*>(steps.sum + h * span + i);
                const int2 first = *reinterpret_cast<const int2*>(steps.first + i);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int at = i + e % 2, j = row + e / 2 * 8;
                    const bool seen = j <= at && j >= (e % 2 == 0 ? first.x : first.y);
                    n[part][e] *= seen ? step[e / 2] * power((e % 2 == 0 ? sum_i.x : sum_i.y) - sum[e / 2]) : 0.0f;
                }
                a[part * 2] = both(n[part][0], n[part][1]);
                a[part * 2 + 1] = both(n[part][2], n[part][3]);
            }
#pragma unroll
            for (int c = 0; c < wide; ++c) {
                unsigned b[4];
                Queries::right_across(queries, c, s, b);
                multiply(dk[c][0], dk[c][1], a, b);
            }
        }
        __syncthreads();
        if (P::stages == 1 && h + 1 < own.heads) bring(h + 1);
    }
    write_rows(r, own, z, 1, span, dc, dk);
}

template <int DK, int DV>
void launch_keys(const TensorScan& r, Dst dc, cudaStream_t stream) {
    const int bytes = KeyParts<DK, DV>::bytes(r.each, key_floats(r.each));
    allow(keys_kernel<DK, DV>, bytes);
    keys_kernel<DK, DV><<<r.grid(r.chunks), all_threads, bytes, stream>>>(r, dc);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void run_tensor_keys(const TensorScan& r, Dst dc, cudaStream_t stream) {
    with_columns(r.s.value_dim, [&]<int DV>() {
        if (r.halves == 1) return launch_keys<span, DV>(r, dc, stream);
        if constexpr (DV <= widest_of_long_states) {
            launch_keys<2 * span, DV>(r, dc, stream);
            const int bytes = RestParts<DV>::bytes(r.each, 0);
            allow(rest_kernel<DV>, bytes);
            rest_kernel<DV><<<r.grid(r.chunks), threads, bytes, stream>>>(r, dc);
            CUDA_CHECK(cudaGetLastError());
        }
    });
}

} // namespace moe::cuda::ssd
