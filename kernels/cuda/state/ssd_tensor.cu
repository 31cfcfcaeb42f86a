// Mamba-2 forward on the tensor cores: what each chunk leaves in a state, states from chunk to chunk, then the outputs
// of all chunks at once. Formulas: kernels/cpu/ssd.cpp.
//
// Floor: v in twice and o out, of each head and chunk a state in FP32 written, read, and in BF16 written and read.
#include "kernels/cuda/state/ssd_tensor.cuh"

namespace moe::cuda::ssd {
namespace {

// (f k)^T (dt v) of a chunk (role 0), or (e q)^T do (role 1). Shared memory: keys or queries | values or gradients,
// twice | steps.
template <int DK, int DV>
__global__ void __launch_bounds__(threads, DK == span && DV <= 64 ? 2 : 1) left_kernel(TensorScan r) {
    using Keys = Tile<DK>;
    using Values = Tile<DV>;
    extern __shared__ __align__(128) unsigned char memory[];
    constexpr int down = DK / span, across = DV / 16, packs = span * DV / pack / threads;
    const int role = static_cast<int>(blockIdx.z / r.s.batch), t = static_cast<int>(threadIdx.x);
    const int warp = t / warp_size, lane = t % warp_size;
    const Share own(r, blockIdx.x + role);
    const Place z(r, own.b, own.first, own.chunk);
    const unsigned keys = ptx::shared_address(memory), values = keys + Keys::bytes(span);
    Steps steps(memory + Keys::bytes(span) + 2 * Values::bytes(span), r.each);
    Keys::load(keys, span, r.rows_of_c + (role == 0 ? z.k(0) : z.q(0)), r.step_of_c(), z.n, r.s.key_dim);
    end_group();
    const Element* const x = role == 0 ? r.rows_of_c + z.v(0) : r.rows_of_do + z.o(0);
    const int step = role == 0 ? r.step_of_c() : r.step_of_o();
    uint4 next[packs];
    const auto fetch_head = [&](int h) {
#pragma unroll
        for (int u = 0; u < packs; ++u) {
            const int item = t + u * threads, i = item / (DV / pack), j = item % (DV / pack) * pack;
            next[u] = i < z.n && j < r.s.value_dim
                          ? *reinterpret_cast<const uint4*>(x + std::int64_t{i} * step + h * r.s.value_dim + j)
                          : uint4{0, 0, 0, 0};
        }
    };
    fetch_head(0);
    steps.read(r, own);
    wait_for_groups<0>();
    __syncthreads();
    unsigned a[down][span / 16][4];
#pragma unroll
    for (int d = 0; d < down; ++d)
#pragma unroll
        for (int block = 0; block < span / 16; ++block) Keys::left_across(keys, warp * down + d, block, a[d][block]);
    for (int h = 0; h < own.heads; ++h) {
        const unsigned buffer = values + static_cast<unsigned>(h % 2 * Values::bytes(span));
#pragma unroll
        for (int u = 0; u < packs; ++u) {
            const int item = t + u * threads, i = item / (DV / pack);
            const float by = role == 0 ? steps.to_behind(h, i) * steps.step[h * span + i] : steps.from_before(h, i);
            const auto scaled = [&](unsigned two) { return both(low_of(two) * by, high_of(two) * by); };
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(Values::at(buffer, i, item % (DV / pack))),
                         "r"(scaled(next[u].x)), "r"(scaled(next[u].y)), "r"(scaled(next[u].z)), "r"(scaled(next[u].w))
                         : "memory");
        }
        if (h + 1 < own.heads) fetch_head(h + 1);
        __syncthreads();
        float sum[down][across][2][4] = {};
#pragma unroll
        for (int block = 0; block < span / 16; ++block)
#pragma unroll
            for (int c = 0; c < across; ++c) {
                unsigned b[4];
                Values::right_across(buffer, c, block, b);
#pragma unroll
                for (int d = 0; d < down; ++d) multiply(sum[d][c][0], sum[d][c][1], a[d][block], b);
            }
        float* const out = r.left + r.state_at(role, own.head(r, h), blockIdx.x);
#pragma unroll
        for (int d = 0; d < down; ++d)
#pragma unroll
            for (int c = 0; c < across * 2; ++c)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = (warp * down + d) * 16 + lane / 4 + half * 8, column = c * 8 + lane % 4 * 2;
                    const float(&two)[4] = sum[d][c / 2][c % 2];
                    if (row < r.s.key_dim && column < r.s.value_dim)
                        *reinterpret_cast<float2*>(out + row * r.s.value_dim + column) = {two[half * 2],
                                                                                          two[half * 2 + 1]};
                }
        if (role == 0 && t == 0) Place(r, own.b, own.first + h, own.chunk).numbers()[0] = steps.from_before(h, z.n - 1);
    }
}

// A thread for four elements of a head's state, from chunk to chunk; of gradients from the last to the first.
__global__ void __launch_bounds__(threads) passing_kernel(TensorScan r) {
    constexpr int ahead = 8;
    const std::int64_t element = (std::int64_t{blockIdx.x} * threads + threadIdx.x) * 4, count = r.chunks - 1;
    if (element >= r.size) return;
    const int role = static_cast<int>(blockIdx.z / r.s.batch), b = static_cast<int>(blockIdx.z % r.s.batch);
    const std::int64_t head = std::int64_t{b} * r.s.value_heads + blockIdx.y;
    const float* const carried = r.numbers + head * r.chunks * 4;
    float4 passed{0.0f, 0.0f, 0.0f, 0.0f};
    for (std::int64_t from = 0; from < count; from += ahead) {
        float4 own[ahead];
        float by[ahead];
#pragma unroll
        for (int u = 0; u < ahead; ++u) {
            const std::int64_t i = from + u, place = role == 0 ? i : count - 1 - i;
            if (i >= count) continue;
            own[u] = *reinterpret_cast<const float4*>(r.left + r.state_at(role, head, place) + element);
            by[u] = i == 0 ? 0.0f : carried[(place + role) * 4];
        }
#pragma unroll
        for (int u = 0; u < ahead; ++u) {
            const std::int64_t i = from + u, place = role == 0 ? i : count - 1 - i;
            if (i >= count) continue;
            passed = {by[u] * passed.x + own[u].x, by[u] * passed.y + own[u].y, by[u] * passed.z + own[u].z,
                      by[u] * passed.w + own[u].w};
            *reinterpret_cast<uint2*>(r.passed + r.state_at(role, head, place) + element) = {both(passed.x, passed.y),
                                                                                             both(passed.z, passed.w)};
        }
    }
}

// Queries | operands of strips | stages of values and the state, where the keys are at first | steps.
template <int DK, int DV>
struct Outputs {
    using Keys = Tile<DK>;
    using Values = Tile<DV>;
    static constexpr int stage = Values::bytes(span) + Values::bytes(DK), keys = Keys::bytes(span);
    static constexpr int stages_at = keys + all_strips * operand_bytes,
                         stages = stages_at + 2 * stage <= 202 * 1024 ? 2 : 1;
    static constexpr int steps_at = stages_at + std::max(stages * stage, keys);
    static constexpr bool early = stages == 2 && stage >= keys; // the first head's operands may arrive beside the keys
    __host__ static int bytes(int heads) { return steps_at + Steps::bytes(heads); }
};

template <int DK, int DV>
__global__ void __launch_bounds__(all_threads, 1) outputs_kernel(TensorScan r, Dst o) {
    using O = Outputs<DK, DV>;
    using Keys = Tile<DK>;
    using Values = Tile<DV>;
    extern __shared__ __align__(128) unsigned char memory[];
    constexpr int pieces = DV / 16; // of eight columns, of each side
    const int t = static_cast<int>(threadIdx.x), lane = t % warp_size, mine = rows_of_warp(), side = t / threads;
    const Share own(r, blockIdx.x);
    const Place z(r, own.b, own.first, own.chunk);
    const unsigned queries = ptx::shared_address(memory), stages = queries + O::stages_at;
    const unsigned keys = queries + static_cast<unsigned>(O::steps_at) - O::keys;
    // Strip s of these positions, s <= mine.
    const unsigned operands =
        queries + O::keys + static_cast<unsigned>(lane * 16 + mine * (mine + 1) / 2 * operand_bytes);
    Steps steps(memory + O::steps_at, r.each);
    const auto bring = [&](int h) {
        const unsigned at = stages + static_cast<unsigned>(h % O::stages * O::stage);
        Values::template load<all_threads>(at, span, r.rows_of_c + z.v(0) + h * r.s.value_dim, r.step_of_c(), z.n,
                                           r.s.value_dim);
        if (own.chunk > 0)
            Values::template load<all_threads>(at + Values::bytes(span), DK, r.before(own.head(r, h), own.chunk),
                                               r.s.value_dim, r.s.key_dim, r.s.value_dim);
        end_group();
    };
    Keys::template load<all_threads>(queries, span, r.rows_of_c + z.q(0), r.step_of_c(), z.n, r.s.key_dim);
    Keys::template load<all_threads>(keys, span, r.rows_of_c + z.k(0), r.step_of_c(), z.n, r.s.key_dim);
    end_group();
    if (O::early) bring(0);
    steps.read(r, own);
    wait_for_groups<O::early ? 1 : 0>();
    __syncthreads();
    float raw[strips / 2][2][4] = {}; // q k^T
#pragma unroll
    for (int block = 0; block < DK / 16; ++block) {
        unsigned a[4];
        Keys::left(queries, mine * 16, block, a);
#pragma unroll
        for (int i = 0; i < strips / 2; ++i) {
            const int s = side + i * 2;
            if (s > mine) continue;
            unsigned b[4];
            Keys::right(keys, s, block, b);
            multiply(raw[i][0], raw[i][1], a, b);
        }
    }
    __syncthreads();
    if (!O::early) bring(0);
    const int row = mine * 16 + lane / 4, pair = lane % 4 * 2;
    const int first[2] = {steps.first[row], steps.first[row + 8]};
    for (int h = 0; h < own.heads; ++h) {
        if (O::stages == 2 && h + 1 < own.heads) {
            bring(h + 1);
            wait_for_groups<1>();
        } else {
            wait_for_groups<0>();
        }
        __syncthreads();
        const unsigned values = stages + static_cast<unsigned>(h % O::stages * O::stage),
                       state = values + Values::bytes(span);
        const float sum[2] = {steps.sum[h * span + row], steps.sum[h * span + row + 8]};
#pragma unroll 1
        for (int s = side; s <= mine; s += 2) {
            unsigned a[4];
#pragma unroll
            for (int part = 0; part < 2; ++part) {
                const int j = s * 16 + part * 8 + pair;
                const float2 sum_j = *reinterpret_cast<const float2*>(steps.sum + h * span + j),
                             step = *reinterpret_cast<const float2*>(steps.step + h * span + j);
                float weight[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int at = j + i % 2;
                    const bool seen = at <= row + i / 2 * 8 && at >= first[i / 2];
                    const float decay = power(sum[i / 2] - (i % 2 == 0 ? sum_j.x : sum_j.y));
                    weight[i] = seen ? of_strip(raw, s / 2, part, i) * decay * (i % 2 == 0 ? step.x : step.y) : 0.0f;
                }
                a[part * 2] = both(weight[0], weight[1]);
                a[part * 2 + 1] = both(weight[2], weight[3]);
            }
            put_operand(operands + static_cast<unsigned>(s * operand_bytes), a);
        }
        float out[pieces][4] = {};
        if (own.chunk > 0) {
#pragma unroll 4
            for (int block = 0; block < DK / 16; ++block) {
                unsigned a[4];
                Keys::left(queries, mine * 16, block, a);
                multiply_pieces<Values>(out, a, state, side, block);
            }
            const float e[2] = {steps.from_before(h, row), steps.from_before(h, row + 8)};
#pragma unroll
            for (int c = 0; c < pieces; ++c)
#pragma unroll
                for (int i = 0; i < 4; ++i) out[c][i] *= e[i / 2];
        }
        meet(mine);
#pragma unroll 2
        for (int s = 0; s <= mine; ++s) {
            unsigned a[4];
            take_operand(operands + static_cast<unsigned>(s * operand_bytes), a);
            multiply_pieces<Values>(out, a, values, side, s);
        }
        const Place to(r, own.b, own.first + h, own.chunk);
        const float skip = load(r.skip, to.weight());
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = row + half * 8;
            if (i >= z.n) continue;
            auto* const at = static_cast<unsigned*>(o.data) + (to.o(i) + pair) / 2;
#pragma unroll
            for (int c = 0; c < pieces; ++c) {
                const int column = piece_of<pieces>(side, c) * 8;
                if (column >= r.s.value_dim) continue;
                const float2 v = Values::pair(values, i, column + pair);
                at[column / 2] = both(out[c][half * 2] + skip * v.x, out[c][half * 2 + 1] + skip * v.y);
            }
        }
        __syncthreads();
        if (O::stages == 1 && h + 1 < own.heads) bring(h + 1);
    }
}

// Calls with the sizes that states are filled up to.
template <class Call>
void with_sizes(const StateShape& s, const Call& call) {
    with_columns(s.value_dim, [&]<int DV>() {
        if (s.key_dim <= span) return call.template operator()<span, DV>();
        call.template operator()<2 * span, DV>();
    });
}

} // namespace

bool tensor_takes(const StateShape& s, bool grad, std::initializer_list<Src> operands) {
    const auto whole = [](int columns) { return columns % pack == 0 && columns >= 16; };
    const bool types =
        std::all_of(operands.begin(), operands.end(), [](const Src& x) { return x.type == Type::bf16 && aligned(x); });
    return types && whole(s.key_dim) && whole(s.value_dim) && s.value_dim <= 128 &&
           s.key_dim <= (grad && s.value_dim > widest_of_long_states ? span : 2 * span) &&
           s.key_dim * s.value_dim >= 512 && s.seq() > state_chunk &&
           TensorScan(s, {}, {}, {}, {}, {}, {}, nullptr, grad).fits(grad);
}

void run_tensor_states(const TensorScan& r, bool grad, cudaStream_t stream) {
    if (r.chunks == 1) return;
    const int roles = grad ? 2 : 1;
    with_sizes(r.s, [&]<int DK, int DV>() {
        const int bytes = Tile<DK>::bytes(span) + 2 * Tile<DV>::bytes(span) + Steps::bytes(r.each);
        allow(left_kernel<DK, DV>, bytes);
        left_kernel<DK, DV><<<r.grid(r.chunks - 1, roles), threads, bytes, stream>>>(r);
    });
    CUDA_CHECK(cudaGetLastError());
    const dim3 grid(blocks_for(r.size, threads * 4), static_cast<unsigned>(r.s.value_heads),
                    static_cast<unsigned>(r.s.batch * roles));
    passing_kernel<<<grid, threads, 0, stream>>>(r);
    CUDA_CHECK(cudaGetLastError());
}

void run_tensor(const StateShape& s, Src c, Src p, Src a_log, Src dt_bias, Src skip, Dst o, float* work,
                cudaStream_t stream) {
    const TensorScan r(s, c, p, a_log, dt_bias, skip, {}, work, false);
    run_tensor_states(r, false, stream);
    with_sizes(s, [&]<int DK, int DV>() {
        const int bytes = Outputs<DK, DV>::bytes(r.each);
        allow(outputs_kernel<DK, DV>, bytes);
        outputs_kernel<DK, DV><<<r.grid(r.chunks), all_threads, bytes, stream>>>(r, o);
    });
    CUDA_CHECK(cudaGetLastError());
}

} // namespace moe::cuda::ssd
