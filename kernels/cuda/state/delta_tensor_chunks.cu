// The gradients of a gated delta rule's chunks on the tensor cores, but for those of the states between them.
//
// Floor: of each chunk and head both states, V', its gradient, W, U and the inverse in, with q, k, v and do; dc out.
// Formulas: kernels/cpu/delta_rule.cpp; gradients of queries and keys are of rows as they came, with what makes them
// units held, so that sums over columns of the chunk's squares are products of rows: q . dq and k . dk.
#include "kernels/cuda/state/delta_tensor_grad.cuh"

namespace moe::cuda::delta {
namespace {

constexpr int halves = 2, strips = rows / 16;
static_assert(threads == strips * halves * warp_size);

struct Parts { // shared memory: keys | what holds one operand after another
    static constexpr int large = Wide::bytes(rows), one = large + Tall::bytes(widest), two = one + Wide::bytes(rows),
                         three = two + Wide::bytes(rows), square = three + Turned::bytes(widest),
                         bytes = square + Square::bytes(rows);
    static constexpr int u = Tall::bytes(rows); // behind W, where a state has been
};

// A warp's 16 rows and half of the columns.
using Sums = float[key_pieces / halves][4];

struct Mine { // a thread's place in Sums
    int lane, strip, half, row, pair;
    __device__ Mine() {
        const int t = static_cast<int>(threadIdx.x);
        lane = t % warp_size, strip = t / warp_size % strips, half = t / warp_size / strips;
        row = strip * 16 + lane / 4, pair = lane % 4 * 2;
    }
    __device__ int column(int c) const { return half * (widest / halves) + c * 8 + pair; }
};

// x += left(block) right(columns, block) over blocks of 16 contracted elements from `from` up to `to`.
template <int blocks, int n, class Left, class Right>
__device__ void accumulate(float (&x)[n][4], int from, int to, Left left, Right right) {
#pragma unroll
    for (int block = 0; block < blocks; ++block) {
        if (block < from || block >= to) continue;
        unsigned a[4];
        left(block, a);
#pragma unroll
        for (int c = 0; c < n / 2; ++c) {
            unsigned b[4];
            right(c, block, b);
            multiply(x[2 * c], x[2 * c + 1], a, b);
        }
    }
}

__device__ void times(Sums& x, float upper, float lower) {
#pragma unroll
    for (int i = 0; i < key_pieces / halves * 4; ++i) x[i / 4][i % 4] *= i % 4 < 2 ? upper : lower;
}
__device__ void plus(Sums& x, const Sums& y) {
#pragma unroll
    for (int i = 0; i < key_pieces / halves * 4; ++i) x[i / 4][i % 4] += y[i / 4][i % 4];
}
// A thread's part of x . rows of the tile.
__device__ float2 along(const Mine& at, unsigned tile, const Sums& x) {
    float2 sum{0.0f, 0.0f};
#pragma unroll
    for (int c = 0; c < key_pieces / halves; ++c) {
        const float2 upper = Wide::pair(tile, at.row, at.column(c)), lower = Wide::pair(tile, at.row + 8, at.column(c));
        sum.x += x[c][0] * upper.x + x[c][1] * upper.y;
        sum.y += x[c][2] * lower.x + x[c][3] * lower.y;
    }
    return sum;
}
__device__ void put(const Mine& at, unsigned tile, const Sums& x, float sign) {
#pragma unroll
    for (int i = 0; i < key_pieces / halves * 2; ++i) {
        const float(&two)[4] = x[i / 2];
        Wide::put_pair(tile, at.row + i % 2 * 8, at.column(i / 2),
                       both(sign * two[i % 2 * 2], sign * two[i % 2 * 2 + 1]));
    }
}

// Sums over the value heads of a key head so far: `kept` is read but by the first, and written but by the last.
__device__ void carry(Sums& x, float* kept, bool read, bool write) {
    float4* const at = reinterpret_cast<float4*>(kept) + threadIdx.x;
#pragma unroll
    for (int c = 0; c < key_pieces / halves; ++c) {
        if (read) {
            const float4 before = at[c * threads];
            x[c][0] += before.x, x[c][1] += before.y, x[c][2] += before.z, x[c][3] += before.w;
        }
        if (write) at[c * threads] = {x[c][0], x[c][1], x[c][2], x[c][3]};
    }
}

struct Shared {
    Gates gates[2]; // of this head and the next
    float unit_q[rows], unit_k[rows];
    float dg[halves][rows], steps[halves][rows], dots[halves][rows];
};

// d less its part along the rows of the tile, to dc: gradients of rows that units were made of.
__device__ void write_rows(const Mine& at, Shared& shared, const Place& z, std::int64_t first, unsigned tile,
                           const float* units, float scale, const Sums& d, Dst dc) {
    const float2 dot = along(at, tile, d);
    const float upper = quad_sum(dot.x), lower = quad_sum(dot.y);
    if (at.lane % 4 == 0) shared.dots[at.half][at.row] = upper, shared.dots[at.half][at.row + 8] = lower;
    __syncthreads();
#pragma unroll
    for (int down = 0; down < 2; ++down) {
        const int i = at.row + down * 8;
        if (i >= z.n) continue;
        const float unit = units[i] * scale, by = (shared.dots[0][i] + shared.dots[1][i]) * unit * unit;
        auto* const to = static_cast<unsigned*>(dc.data) + (first + std::int64_t{i} * z.step()) / 2;
#pragma unroll
        for (int c = 0; c < key_pieces / halves; ++c) {
            const float2 x = Wide::pair(tile, i, at.column(c));
            to[at.column(c) / 2] = both(d[c][2 * down] - by * x.x, d[c][2 * down + 1] - by * x.y);
        }
    }
    __syncthreads();
}

// A chunk of the value heads of a key head, one after the other.
__global__ void __launch_bounds__(threads, 2) chunks_kernel(Rule r, Src dout, Dst dc, Dst dp) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Shared shared;
    const Mine at;
    const int t = static_cast<int>(threadIdx.x), b = static_cast<int>(blockIdx.z),
              head = static_cast<int>(blockIdx.y) * r.share, half = at.half, strip = at.strip;
    const unsigned keys = ptx::shared_address(memory), large = keys + Parts::large, one = keys + Parts::one,
                   two = keys + Parts::two, three = keys + Parts::three, square = keys + Parts::square;
    const Kept sum(r, b, head, blockIdx.x);
    const auto of_keys = [&](int c, int block, unsigned(&x)[4]) { Wide::right_across(keys, half * 4 + c, block, x); };
    const auto of_state = [&](int c, int block, unsigned(&x)[4]) { Tall::right_across(large, half * 4 + c, block, x); };
    const auto of_one = [&](int c, int block, unsigned(&x)[4]) { Wide::right_across(one, half * 4 + c, block, x); };
    const auto square_rows = [&](int block, unsigned(&x)[4]) { Square::left(square, strip * 16, block, x); };
    const auto square_columns = [&](int block, unsigned(&x)[4]) { Square::left_across(square, strip, block, x); };
    const auto bring = [&](int h) { // gates, dS', V', do, dV'
        const Kept z(r, b, head + h, blockIdx.x);
        if (t < gate_packs)
            copy_async(reinterpret_cast<int4*>(&shared.gates[h % 2]) + t, reinterpret_cast<const int4*>(z.gates()) + t);
        Tall::load(large, widest, z.dstate());
        Turned::load(one, widest, z.fresh());
        Wide::load(two, rows, elements(dout) + z.o(0), z.step_of_o(), z.n);
        Turned::load(three, widest, z.dfresh());
        end_group();
    };
    Wide::load(keys, rows, elements(r.c) + sum.k(0), sum.step(), sum.n);
    bring(0);
    if (t < rows) shared.unit_q[t] = sum.unit_queries()[t], shared.unit_k[t] = sum.unit_keys()[t];
    for (int h = 0; h < r.share; ++h) {
        const Kept z(r, b, head + h, blockIdx.x);
        const bool last = h + 1 == r.share;
        if (t == 0) { // what the next steps need comes nearer
            ptx::prefetch_bytes(z.state(), Tall::bytes(widest));
            ptx::prefetch_bytes(z.w(), 2 * Tall::bytes(rows)); // U is behind W
            ptx::prefetch_bytes(z.inverse(), Square::bytes(rows));
        }
        const Gates& g = shared.gates[h % 2];
        wait_for_groups<0>();
        __syncthreads();

        // dk = f V' dS'^T, and the scores' (do V'^T o D) with what makes units.
        Sums dk = {};
        accumulate<8>(
            dk, 0, 8, [&](int block, unsigned(&x)[4]) { Turned::left_across(one, strip, block, x); }, of_state);
        {
            float p[4][4] = {};
            accumulate<8>(
                p, 0, 8, [&](int block, unsigned(&x)[4]) { Wide::left(two, strip * 16, block, x); },
                [&](int c, int block, unsigned(&x)[4]) { Turned::right_across(one, half * 2 + c, block, x); });
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int row = at.row + i % 2 * 8, column = half * 32 + i / 2 * 8 + at.pair;
                const float unit = row < z.n ? shared.unit_q[row] : 0.0f;
                Square::put_pair(
                    square, row, column,
                    both(p[i / 2][i % 2 * 2] * between(g, row, column) * unit * shared.unit_k[column],
                         p[i / 2][i % 2 * 2 + 1] * between(g, row, column + 1) * unit * shared.unit_k[column + 1]));
            }
        }
        times(dk, g.f[at.row] * shared.unit_k[at.row], g.f[at.row + 8] * shared.unit_k[at.row + 8]);
        const float2 forward = along(at, keys, dk);
        float2 dg{0.0f, 0.0f}, steps{0.0f, 0.0f}; // of the rows' gates, and of beta times beta
        float carried = 0.0f;                     // this thread's part of S . dS'
        __syncthreads();
        {
            constexpr int packs = Tall::bytes(widest) / 16 / threads;
            int4 behind[packs];
#pragma unroll
            for (int u = 0; u < packs; ++u) {
                const unsigned place = large + static_cast<unsigned>((t + u * threads) * 16);
                behind[u] = ptx::read_shared(place);
                copy_or_clear(place, z.state() + (t + u * threads) * pack, true);
            }
            Wide::load(one, rows, elements(r.c) + z.q(0), z.step(), z.n);
            end_group();
            wait_for_groups<0>();
#pragma unroll
            for (int u = 0; u < packs; ++u) {
                const int4 before = ptx::read_shared(large + static_cast<unsigned>((t + u * threads) * 16));
                const auto dot = [&](int x, int y) {
                    const auto p = static_cast<unsigned>(x), q = static_cast<unsigned>(y);
                    carried += low_of(p) * low_of(q) + high_of(p) * high_of(q);
                };
                dot(before.x, behind[u].x), dot(before.y, behind[u].y), dot(before.z, behind[u].z),
                    dot(before.w, behind[u].w);
            }
        }
        __syncthreads();

        // Queries, and keys of the scores.
        accumulate<strips>(dk, strip, strips, square_columns, of_one);
        {
            Sums dq = {};
            accumulate<8>(
                dq, 0, 8, [&](int block, unsigned(&x)[4]) { Wide::left(two, strip * 16, block, x); }, of_state);
            times(dq, g.e[at.row] * shared.unit_q[at.row], g.e[at.row + 8] * shared.unit_q[at.row + 8]);
            accumulate<strips>(dq, 0, strip + 1, square_rows, of_keys);
            const float2 queries = along(at, one, dq), of = along(at, keys, dk);
            dg.x += queries.x - of.x, dg.y += queries.y - of.y;
            carry(dq, sum.dq(), h > 0, !last);
            if (last) write_rows(at, shared, z, z.q(0), one, shared.unit_q, sqrtf(static_cast<float>(widest)), dq, dc);
        }
        // dX and dY, behind both systems. two: -dV' S^T; one: dX, then two: -dY.
        Sums dx = {};
        accumulate<8>(
            dx, 0, 8, [&](int block, unsigned(&x)[4]) { Turned::left_across(three, strip, block, x); }, of_state);
        __syncthreads();
        put(at, two, dx, -1.0f);
        Square::load(square, rows, z.inverse());
        Tall::load(large, rows, z.w());
        Turned::load(large + Parts::u, widest, z.u());
        end_group();
        wait_for_groups<0>();
        __syncthreads();
        {
            Sums x = {};
            accumulate<strips>(x, strip, strips, square_columns, [&](int c, int block, unsigned(&y)[4]) {
                Wide::right_across(two, half * 4 + c, block, y);
            });
            put(at, one, x, 1.0f);
            const auto by = [&](int i) { return g.beta[i] * g.e[i] * shared.unit_k[i]; };
            times(x, by(at.row), by(at.row + 8));
            const float2 dot = along(at, keys, x);
            dg.x += dot.x, dg.y += dot.y, steps.x += dot.x, steps.y += dot.y;
            plus(dk, x);
        }
        {
            Sums y = {};
            accumulate<strips>(y, strip, strips, square_columns, [&](int c, int block, unsigned(&x)[4]) {
                Turned::right(three, half * 4 + c, block, x);
            });
            __syncthreads();
            put(at, two, y, -1.0f);
#pragma unroll
            for (int i = 0; i < key_pieces / halves * 2; ++i) {
                const int down = i % 2, row = at.row + down * 8;
                if (row >= z.n) continue;
                const std::int64_t place = (z.v(0) + std::int64_t{row} * z.step() + at.column(i / 2)) / 2;
                const float upper = g.beta[row] * y[i / 2][2 * down], lower = g.beta[row] * y[i / 2][2 * down + 1];
                const unsigned v = static_cast<const unsigned*>(r.c.data)[place];
                static_cast<unsigned*>(dc.data)[place] = both(upper, lower);
                (down == 0 ? steps.x : steps.y) += upper * low_of(v) + lower * high_of(v);
            }
        }
        __syncthreads();

        // square: dA o D with beta and what makes units, below the diagonal.
        {
            float a[4][4] = {};
            if (half * 32 < strip * 16 + 16) {
                accumulate<8>(
                    a, 0, 8, [&](int block, unsigned(&x)[4]) { Wide::left(one, strip * 16, block, x); },
                    [&](int c, int block, unsigned(&x)[4]) { Tall::right(large, half * 2 + c, block, x); });
                accumulate<8>(
                    a, 0, 8, [&](int block, unsigned(&x)[4]) { Wide::left(two, strip * 16, block, x); },
                    [&](int c, int block, unsigned(&x)[4]) {
                        Turned::right_across(large + Parts::u, half * 2 + c, block, x);
                    });
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int row = at.row + i % 2 * 8, column = half * 32 + i / 2 * 8 + at.pair;
                const float unit = row < z.n ? g.beta[row] * shared.unit_k[row] : 0.0f;
                const auto of = [&](float x, int j) {
                    return j < row ? x * between(g, row, j) * unit * shared.unit_k[j] : 0.0f;
                };
                Square::put_pair(square, row, column,
                                 both(of(a[i / 2][i % 2 * 2], column), of(a[i / 2][i % 2 * 2 + 1], column + 1)));
            }
        }
        __syncthreads();
        if (!last) bring(h + 1);
        {
            Sums x = {};
            accumulate<strips>(x, 0, strip + 1, square_rows, of_keys);
            const float2 dot = along(at, keys, x);
            dg.x += dot.x, dg.y += dot.y, steps.x += dot.x, steps.y += dot.y;
            plus(dk, x);
        }
        {
            Sums x = {};
            accumulate<strips>(x, strip, strips, square_columns, of_keys);
            const float2 dot = along(at, keys, x);
            dg.x -= dot.x, dg.y -= dot.y;
            plus(dk, x);
        }
        carry(dk, sum.dk(), h > 0, !last);
        if (last) write_rows(at, shared, z, z.k(0), keys, shared.unit_k, 1.0f, dk, dc);

        // Gates.
        const auto share = [&](float(&out)[halves][rows], float2 x) {
            const float upper = quad_sum(x.x), lower = quad_sum(x.y);
            if (at.lane % 4 == 0) out[half][at.row] = upper, out[half][at.row + 8] = lower;
        };
        share(shared.dg, dg);
        share(shared.steps, steps);
        const float of_last = block_sum(g.carried * carried + forward.x + forward.y);
        __syncthreads();
        if (t < warp_size) { // from sums within the chunk to g: a lane has two rows, and sums from behind
            const auto of = [&](int i) { return i < z.n ? shared.dg[0][i] + shared.dg[1][i] : 0.0f; };
            const float second = of(2 * t + 1), pair = of(2 * t) + second;
            float later = pair;
#pragma unroll
            for (int offset = 1; offset < warp_size; offset *= 2) {
                const float behind = __shfl_down_sync(all_lanes, later, offset);
                if (t + offset < warp_size) later += behind;
            }
            const float behind = __shfl_down_sync(all_lanes, later, 1);
            shared.dots[0][2 * t] = later + of_last;
            shared.dots[0][2 * t + 1] = (t + 1 < warp_size ? second + behind : second) + of_last;
        }
        __syncthreads();
        float a_log = 0.0f, bias = 0.0f;
        if (t < z.n) {
            const float later = shared.dots[0][t], step = load(r.p, z.decay(t)) + load(r.dt_bias, z.weight()),
                        da = -later * expf(load(r.a_log, z.weight())) / (1.0f + expf(-step));
            store(dp, z.beta(t), (shared.steps[0][t] + shared.steps[1][t]) * (1.0f - g.beta[t]));
            store(dp, z.decay(t), da);
            a_log = later * g.g[t];
            bias = da;
        }
        a_log = block_sum(a_log);
        bias = block_sum(bias);
        if (t == 0) z.sums()[0] = a_log, z.sums()[1] = bias;
        __syncthreads(); // before the next head's gates
    }
}

} // namespace

void run_tensor_chunks(const Rule& r, Src dout, Dst dc, Dst dp, cudaStream_t stream) {
    allow(chunks_kernel, Parts::bytes);
    chunks_kernel<<<dim3(static_cast<unsigned>(r.chunks), static_cast<unsigned>(r.s.key_heads),
                         static_cast<unsigned>(r.s.batch)),
                    threads, Parts::bytes, stream>>>(r, dout, dc, dp);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace moe::cuda::delta
