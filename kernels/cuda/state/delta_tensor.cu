// The gated delta rule forward on the tensor cores: systems of all chunks at once, then states from chunk to chunk.
//
// Floor: q, k, v and the gates in and o out, with W, U and the scores of each chunk and head written and read between.
// Formulas: kernels/cpu/delta_rule.cpp.
#include "kernels/cuda/state/delta_tensor.cuh"

namespace moe::cuda::delta {
namespace {

constexpr int square_stride = rows + 4;

// t <- (I + A)^-1 of the strictly lower A, in FP32: blocks of 16 rows on the diagonal, then those below them from above
// to below, 64 threads for each column of blocks. `between` holds three blocks. All threads take part; they have met
// before and meet at the end.
__device__ void invert(const float* a, float* t, float* between) {
    constexpr int block = 16, blocks = rows / block, team = threads / blocks;
    const int thread = static_cast<int>(threadIdx.x), at = thread / team, i = thread % team / 8 * 2, j = thread % 8 * 2;
    for (int item = thread; item < rows * rows; item += threads) t[item / rows * square_stride + item % rows] = 0.0f;
    __syncthreads();
    if (thread < rows) {
        const int first = thread / block * block, column = thread % block;
        float x[block];
#pragma unroll
        for (int row = 0; row < block; ++row) {
            float sum = row == column ? 1.0f : 0.0f;
#pragma unroll
            for (int l = 0; l < row; ++l) sum -= a[(first + row) * square_stride + first + l] * x[l];
            x[row] = sum;
            t[(first + row) * square_stride + first + column] = sum;
        }
    }
    __syncthreads();
    // A thread has two rows and two columns of a block: sum += x y, with x a block of rows as above, y of stride
    // `step`.
    const auto multiply_block = [&](float(&sum)[2][2], const float* x, const float* y, int step) {
#pragma unroll
        for (int l = 0; l < block; l += 4) {
            const float4 upper = *reinterpret_cast<const float4*>(x + i * square_stride + l),
                         lower = *reinterpret_cast<const float4*>(x + (i + 1) * square_stride + l);
            const float of[2][4] = {{upper.x, upper.y, upper.z, upper.w}, {lower.x, lower.y, lower.z, lower.w}};
#pragma unroll
            for (int u = 0; u < 4; ++u) {
                const float2 two = *reinterpret_cast<const float2*>(y + (l + u) * step + j);
                sum[0][0] += of[0][u] * two.x, sum[0][1] += of[0][u] * two.y;
                sum[1][0] += of[1][u] * two.x, sum[1][1] += of[1][u] * two.y;
            }
        }
    };
    float* const mine = between + at * block * block;
    const auto meet = [&] { asm volatile("bar.sync %0, %1;" ::"r"(at + 1), "n"(team) : "memory"); };
    for (int down = at + 1; down < blocks; ++down) {
        const int first = down * block;
        float sum[2][2] = {};
        for (int l = at; l < down; ++l)
            multiply_block(sum, a + first * square_stride + l * block, t + l * block * square_stride + at * block,
                           square_stride);
#pragma unroll
        for (int u = 0; u < 2; ++u) *reinterpret_cast<float2*>(mine + (i + u) * block + j) = {sum[u][0], sum[u][1]};
        meet();
        float less[2][2] = {};
        multiply_block(less, t + first * square_stride + first, mine, block);
#pragma unroll
        for (int u = 0; u < 2; ++u)
            *reinterpret_cast<float2*>(t + (first + i + u) * square_stride + at * block + j) = {-less[u][0],
                                                                                                -less[u][1]};
        meet();
    }
    __syncthreads();
}

// What makes a tile's rows units of length `scale`: four threads for each row.
__device__ void read_units(unsigned tile, float scale, float* out) {
    const int i = static_cast<int>(threadIdx.x) / 4, lane = static_cast<int>(threadIdx.x) % 4;
    float squares = 0.0f;
#pragma unroll
    for (int u = 0; u < key_pieces; ++u) {
        const float2 two = Wide::pair(tile, i, u * 8 + lane * 2);
        squares += two.x * two.x + two.y * two.y;
    }
    squares = quad_sum(squares);
    if (lane == 0) out[i] = rsqrtf(squares + 1e-6f) * scale;
}

struct Systems { // shared memory
    static constexpr int queries = Wide::bytes(rows), values = 2 * queries, a = 4 * queries,
                         inverse = a + rows * square_stride * 4, bytes = inverse + rows * square_stride * 4;
};
static_assert(threads == 4 * rows);

// W, U and the scores of a chunk for each value head of a key head. A warp has 16 rows and half of the columns.
__global__ void __launch_bounds__(threads, 2) systems_kernel(Rule r) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ Gates gates[2]; // of two heads, a warp for each
    __shared__ float unit_k[rows], unit_q[rows];
    __shared__ __align__(16) float between_[3 * 256];
    const int b = static_cast<int>(blockIdx.z), first = static_cast<int>(blockIdx.y) * r.share,
              t = static_cast<int>(threadIdx.x), lane = t % warp_size, strip = t / warp_size % 4, half = t / 128;
    const Place any(r, b, first, blockIdx.x);
    const unsigned keys = ptx::shared_address(memory), queries = keys + Systems::queries;
    float *const a = reinterpret_cast<float*>(memory + Systems::a), *const inverse = reinterpret_cast<float*>(
                                                                        memory + Systems::inverse);
    const auto values = [&](int h) {
        return keys + static_cast<unsigned>(Systems::values + h % 2 * Wide::bytes(rows));
    };
    const auto bring = [&](int h) {
        if (h < r.share) Wide::load(values(h), rows, elements(r.c) + any.v(0) + h * widest, any.step(), any.n);
        end_group();
    };
    Wide::load(keys, rows, elements(r.c) + any.k(0), any.step(), any.n);
    Wide::load(queries, rows, elements(r.c) + any.q(0), any.step(), any.n);
    end_group();
    bring(0);
    const auto gates_from = [&](int h) {
        if (t / warp_size < 2 && h + t / warp_size < r.share)
            read_gates_by_warp(Place(r, b, first + h + t / warp_size, blockIdx.x), gates[t / warp_size]);
    };
    gates_from(0);
    wait_for_groups<1>();
    __syncthreads();
    read_units(keys, 1.0f, unit_k);
    read_units(queries, rsqrtf(static_cast<float>(widest)), unit_q);
    float qk[4][4] = {}, kk[4][4] = {};
#pragma unroll
    for (int block = 0; block < key_pieces / 2; ++block) {
        unsigned q[4], k[4];
        Wide::left(queries, strip * 16, block, q);
        Wide::left(keys, strip * 16, block, k);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            unsigned other[4];
            Wide::right(keys, half * 2 + c, block, other);
            multiply(qk[2 * c], qk[2 * c + 1], q, other);
            multiply(kk[2 * c], kk[2 * c + 1], k, other);
        }
    }
    const int row = strip * 16 + lane / 4, pair = lane % 4 * 2;
    for (int h = 0; h < r.share; ++h) {
        const Kept z(r, b, first + h, blockIdx.x);
        bring(h + 1);
        if (h > 0 && h % 2 == 0) gates_from(h);
        __syncthreads();
        const Gates& g = gates[h % 2];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int j = half * 32 + c * 8 + pair;
            float score[4], system[4];
#pragma unroll
            for (int u = 0; u < 4; ++u) {
                const int i = row + u / 2 * 8, other = j + u % 2;
                const float decay = i < z.n ? between(g, i, other) * unit_k[other] : 0.0f;
                score[u] = decay * unit_q[i] * qk[c][u];
                system[u] = other < i ? decay * unit_k[i] * g.beta[i] * kk[c][u] : 0.0f;
            }
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                Square::store(z.scores(), strip * 2 + u, half * 4 + c, both(score[2 * u], score[2 * u + 1]));
                *reinterpret_cast<float2*>(a + (row + u * 8) * square_stride + j) = {system[2 * u], system[2 * u + 1]};
            }
        }
        if (t < rows) {
            z.vectors()[Kept::from_before + t] = g.e[t] * unit_q[t];
            z.vectors()[Kept::to_behind + t] = g.f[t] * unit_k[t];
            z.unit_queries()[t] = unit_q[t], z.unit_keys()[t] = unit_k[t];
            if (t < 4) z.vectors()[Kept::carried + t] = g.carried;
        }
        if (r.grad && t < gate_packs) reinterpret_cast<int4*>(z.gates())[t] = reinterpret_cast<const int4*>(&g)[t];
        __syncthreads();
        invert(a, inverse, between_);
        if (h + 1 < r.share)
            wait_for_groups<1>();
        else
            wait_for_groups<0>();
        __syncthreads();
        const auto system = [&](float(&sum)[8][4], unsigned tile, float sign, bool of_keys) {
#pragma unroll
            for (int block = 0; block < rows / 16; ++block) {
                if (block > strip) continue;
                unsigned left[4];
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    const int j = block * 16 + part / 2 * 8 + pair;
                    const float2 x =
                        *reinterpret_cast<const float2*>(inverse + (row + part % 2 * 8) * square_stride + j);
                    float by[2] = {sign * g.beta[j], sign * g.beta[j + 1]};
                    if (of_keys) by[0] *= g.e[j] * unit_k[j], by[1] *= g.e[j + 1] * unit_k[j + 1];
                    left[part] = both(x.x * by[0], x.y * by[1]);
                    if (r.grad && of_keys && half == 0)
                        Square::store(z.inverse(), strip * 2 + part % 2, block * 2 + part / 2, both(x.x, x.y));
                }
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    unsigned right[4];
                    Wide::right_across(tile, half * 4 + c, block, right);
                    multiply(sum[2 * c], sum[2 * c + 1], left, right);
                }
            }
        };
        {
            float w[8][4] = {};
            system(w, keys, -1.0f, true);
#pragma unroll
            for (int i = 0; i < 16; ++i)
                Tall::store(z.w(), strip * 2 + i % 2, half * 8 + i / 2,
                            both(w[i / 2][i % 2 * 2], w[i / 2][i % 2 * 2 + 1]));
        }
        {
            float u[8][4] = {};
            system(u, values(h), 1.0f, false);
#pragma unroll
            for (int i = 0; i < 16; ++i)
                Turned::store(z.u(), half * 8 + i / 2, strip * 2 + i % 2,
                              ptx::transpose(both(u[i / 2][i % 2 * 2], u[i / 2][i % 2 * 2 + 1])));
        }
        if (r.grad && half == 1) { // above the diagonal
            for (int block = strip + 1; block < rows / 16; ++block)
                for (int part = 0; part < 4; ++part)
                    Square::store(z.inverse(), strip * 2 + part % 2, block * 2 + part / 2, 0u);
        }
        __syncthreads(); // before the next head's gates
    }
}

// A stage of the passing of states. Gradients need no outputs.
template <bool grad>
struct Stage {
    static constexpr int w = 0, keys = w + Tall::bytes(rows), u = keys + Wide::bytes(rows),
                         vectors = u + Turned::bytes(slice), queries = vectors + ceil_div(Kept::factors * 4, 128) * 128,
                         scores = queries + (grad ? 0 : Wide::bytes(rows)),
                         bytes = scores + (grad ? 0 : Square::bytes(rows));
    static constexpr unsigned coming = Tall::bytes(rows) + Turned::bytes(slice) + Kept::factors * 4 +
                                       (grad ? 0 : Square::bytes(rows)); // by the engine
    static_assert(bytes % 128 == 0);
};
constexpr int stages = 3;

// Warps that take operands: with those that pass a state on go as many that compute outputs from it.
template <bool grad>
constexpr int takers = grad ? passing : 2 * passing;
template <bool grad>
using Stages = Ring<stages, Stage<grad>::bytes, takers<grad>>;
constexpr int state_lines = key_pieces / 2, handed_lines = state_lines + pieces / 2; // S^T and V'^T
using Handed = Handing<handed_lines>;

__device__ void write_line(unsigned place, int line, const unsigned (&x)[4]) {
    ptx::write_shared(place + static_cast<unsigned>(line * Handed::line),
                      {static_cast<int>(x[0]), static_cast<int>(x[1]), static_cast<int>(x[2]), static_cast<int>(x[3])});
}
__device__ void read_line(unsigned place, int line, unsigned (&x)[4]) {
    const int4 four = ptx::read_shared(place + static_cast<unsigned>(line * Handed::line));
    x[0] = static_cast<unsigned>(four.x), x[1] = static_cast<unsigned>(four.y);
    x[2] = static_cast<unsigned>(four.z), x[3] = static_cast<unsigned>(four.w);
}

// 16 columns of a chunk's outputs, from the state before it and V'.
__device__ void write_outputs(const Kept& z, unsigned stage, int first, const unsigned (&state)[key_pieces / 2][4],
                              const unsigned (&news)[pieces / 2][4], Dst o) {
    using S = Stage<false>;
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    float out[pieces][4] = {};
    with_rows<Wide>(out, state, stage + S::queries);
    scale(out, stage + S::vectors, Kept::from_before);
#pragma unroll
    for (int block = 0; block < pieces / 2; ++block)
#pragma unroll
        for (int j = block; j < pieces / 2; ++j) {
            unsigned x[4];
            Square::right(stage + S::scores, j, block, x);
            multiply(out[2 * j], out[2 * j + 1], news[block], x);
        }
    auto* to = static_cast<unsigned*>(o.data) + (z.o(lane / 4) + first) / 2 + lane % 4;
#pragma unroll
    for (int j = 0; j < pieces; ++j, to += z.step_of_o() * 4)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const unsigned two = ptx::transpose(both(out[j][2 * half], out[j][2 * half + 1]));
            if (j * 8 + lane / 4 < z.n) to[half * 4] = two;
        }
}

// Passes `slice` columns of a head's state through its chunks, 16 of them in each warp's registers. Without gradients
// other warps compute o; with them V' and the state before each chunk are kept in `work`.
template <bool grad>
__global__ void __launch_bounds__((takers<grad> + 1) * warp_size, 1) states_kernel(Rule r, Dst o) {
    using S = Stage<grad>;
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ __align__(8) std::uint64_t barriers[2 * stages], handing[Handed::barriers];
    const int warp = static_cast<int>(threadIdx.x) / warp_size, lane = static_cast<int>(threadIdx.x) % warp_size,
              b = static_cast<int>(blockIdx.z), h = static_cast<int>(blockIdx.y),
              from = static_cast<int>(blockIdx.x) * slice, first = from + warp % passing * 16;
    Handed handed(memory + Stages<grad>::bytes, handing, warp % passing);
    Stages<grad> ring(memory, barriers);
    if (warp == takers<grad>) {
        for (std::int64_t chunk = 0; chunk < r.chunks; ++chunk, ring.next()) {
            const Kept z(r, b, h, chunk);
            const unsigned stage = ring.to_fill(S::coming), full = ring.filling();
            if (lane == 0) {
                ptx::load_bytes(stage + S::w, z.w(), Tall::bytes(rows), full);
                ptx::load_bytes(stage + S::u, z.u() + from * rows, Turned::bytes(slice), full);
                ptx::load_bytes(stage + S::vectors, z.vectors(), Kept::factors * 4, full);
                if (!grad) ptx::load_bytes(stage + S::scores, z.scores(), Square::bytes(rows), full);
            }
            bring_rows<widest>(stage + S::keys, elements(r.c) + z.k(0), z.step(), z.n);
            if (!grad) bring_rows<widest>(stage + S::queries, elements(r.c) + z.q(0), z.step(), z.n);
            ring.brought();
        }
        return;
    }
    unsigned state[key_pieces / 2][4], news[pieces / 2][4];
    if (!grad && warp >= passing) {
        for (std::int64_t chunk = 0; chunk < r.chunks; ++chunk, ring.next()) {
            const unsigned stage = ring.filled(), place = handed.filled();
#pragma unroll
            for (int i = 0; i < state_lines; ++i) read_line(place, i, state[i]);
#pragma unroll
            for (int i = 0; i < pieces / 2; ++i) read_line(place, state_lines + i, news[i]);
            handed.let_go();
            write_outputs(Kept(r, b, h, chunk), stage, first, state, news, o);
            ring.let_go();
        }
        return;
    }
    Passed s;
    for (std::int64_t chunk = 0; chunk < r.chunks; ++chunk, ring.next()) {
        const Kept z(r, b, h, chunk);
        const unsigned stage = ring.filled(), vectors = stage + S::vectors, place = grad ? 0u : handed.to_fill();
        s.round(state);
        if (grad) store_left<Tall>(z.state(), first, state);
        float fresh[pieces][4]; // V'^T
#pragma unroll
        for (int j = 0; j < pieces / 2; ++j) {
            unsigned two[4];
            Turned::left(stage + S::u, warp * 16, j, two);
#pragma unroll
            for (int u = 0; u < 4; ++u) {
                fresh[2 * j + u / 2][u % 2 * 2] = low_of(two[u]);
                fresh[2 * j + u / 2][u % 2 * 2 + 1] = high_of(two[u]);
            }
        }
        with_rows<Tall>(fresh, state, stage + S::w);
#pragma unroll
        for (int j = 0; j < pieces / 2; ++j) left_of(fresh[2 * j], fresh[2 * j + 1], news[j]);
        if (grad) {
            store_left<Turned>(z.fresh(), first, news);
        } else {
#pragma unroll
            for (int i = 0; i < state_lines; ++i) write_line(place, i, state[i]);
#pragma unroll
            for (int i = 0; i < pieces / 2; ++i) write_line(place, state_lines + i, news[i]);
            handed.hand();
        }
        scale(fresh, vectors, Kept::to_behind);
#pragma unroll
        for (int j = 0; j < pieces / 2; ++j) left_of(fresh[2 * j], fresh[2 * j + 1], news[j]);
        s.times(factors_of(vectors, Kept::carried, 0).x);
        s.add<Wide>(news, stage + S::keys);
        ring.let_go();
    }
}

template <bool grad>
void run_passing(const Rule& r, Dst o, cudaStream_t stream) {
    constexpr int bytes = Stages<grad>::bytes + (grad ? 0 : Handed::bytes);
    allow(states_kernel<grad>, bytes);
    const dim3 grid(widest / slice, static_cast<unsigned>(r.s.value_heads), static_cast<unsigned>(r.s.batch));
    states_kernel<grad><<<grid, (takers<grad> + 1) * warp_size, bytes, stream>>>(r, o);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void run_tensor_states(const Rule& r, Dst o, cudaStream_t stream) {
    allow(systems_kernel, Systems::bytes);
    systems_kernel<<<dim3(static_cast<unsigned>(r.chunks), static_cast<unsigned>(r.s.key_heads),
                          static_cast<unsigned>(r.s.batch)),
                     threads, Systems::bytes, stream>>>(r);
    CUDA_CHECK(cudaGetLastError());
    if (r.grad)
        run_passing<true>(r, o, stream);
    else
        run_passing<false>(r, o, stream);
}

} // namespace moe::cuda::delta
