// Deterministic gradients of attention on Hopper's tensor cores in five products: a CTA goes over the queries of a tile
// of keys, holds dk and dv, and adds to dq in FP32, each CTA in its turn (attention_ordered.cuh).
//
// As FlashAttention-3's backward (Shah et al., arXiv:2407.08608): scores are computed transposed, so that weights and
// their gradients are left operands in registers; score gradients go through shared memory for dq alone. Sums of dq
// leave the registers as reductions in L2: shared memory is what limits the rest. Of every tile of queries the first
// stores, so that nothing is cleared. Other threads load and keep turns (attention_ordered_roles.cuh).
#include "kernels/cuda/attention/attention_ordered.hpp"
#include "kernels/cuda/attention/attention_ordered_roles.cuh"
#include "kernels/cuda/attention/attention_ordered_rows.cuh"

#include <algorithm>

namespace moe::cuda {
namespace {

using namespace tensor_attention;

template <int qk_width, int v_width, bool causal>
__global__ void __launch_bounds__(threads, 1)
    ordered_grad_kernel(const __grid_constant__ Maps maps, AttentionSizes z, OrderedPlan plan, Operands in) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ unsigned char memory[];
    using L = OrderedLayout<qk_width, v_width>;
    constexpr int queries = L::queries;
    // Whether the next step's scores are computed beside this one's gradients: 192 columns leave no registers for it.
    constexpr bool ahead = qk_width < 192;
    const L at(memory);
    at.begin();
    const AttentionShape& s = z.s;
    const int warpgroup = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x / 128), 0);
    OrderedSteps<causal, qk_width> walk(s, plan);
    if (warpgroup == 0) {
        ptx::give_registers<24>();
        if (threadIdx.x == 0) produce(at, maps, in, walk);
        if (threadIdx.x == warp_size) await_turns(at, in, walk);
        if (threadIdx.x == 2 * warp_size) give_turns(at, in, walk);
        return;
    }
    ptx::take_registers<240>();
    const int consumer = warpgroup - 1, lane = static_cast<int>(threadIdx.x % warp_size);
    const Place place;
    const float scale = static_cast<float>(s.scale) * log2_e;
    float dk[qk_width / 2], dv[v_width / 2], scores[queries / 2], dweights[queries / 2], dq[32];
    const auto multiply_scores = [&](int stage) {
        multiply_widths<typename L::Keys, typename L::Queries>(scores, at.keys(), consumer * 64, at.queries_of(stage));
    };
    const auto multiply_dweights = [&](int stage) {
        multiply_widths<typename L::Values, typename L::Results>(dweights, at.values(), consumer * 64,
                                                                 at.results_of(stage));
    };
    Ring ring, turns;
    int half = 0; // of the score gradients' memory
    for (unsigned parity = 0; walk.next_keys(); parity ^= 1) {
        float* const kept_dv = in.kept + std::int64_t{gridDim.x} * 2 * (qk_width / 2) * 2 * 128;
        if (walk.begins_keys()) {
#pragma unroll
            for (float& x : dk) x = 0.0f;
#pragma unroll
            for (float& x : dv) x = 0.0f;
        } else {
            move_kept<false>(in.kept, walk.pass(), dk);
            move_kept<false>(kept_dv, walk.pass(), dv);
        }
        ptx::wait(at.keys_full(), parity);
        if constexpr (ahead) {
            ptx::wait(at.full(ring.stage), ring.parity);
            ptx::fence_products();
            multiply_scores(ring.stage);
            ptx::wait_products<0>();
            ptx::settle(scores);
        }
        for (; walk.has_step(); walk.advance()) {
            const int stage = ring.stage;
            if constexpr (!ahead) ptx::wait(at.full(stage), ring.parity);
            ptx::fence_products();
            if constexpr (ahead) {
                multiply_dweights(stage);
            } else {
                multiply_scores(stage);
                ptx::wait_products<0>();
                ptx::settle(scores);
            }
            const float* numbers = at.numbers_of(stage);
#pragma unroll
            for (int j = 0; j < queries / 8; ++j) {
                const float2 lse = *reinterpret_cast<const float2*>(numbers + 8 * j + place.column);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    scores[4 * j + i] = power_of_two(fmaf(scores[4 * j + i], scale, i % 2 == 0 ? -lse.x : -lse.y));
            }
            const int diagonal = walk.query() + plan.shift - walk.key();
            if ((causal && diagonal < keys_of_tile - 1) || walk.key() + keys_of_tile > s.seq_k) {
                const int row = consumer * 64 + place.row, end = static_cast<int>(s.seq_k) - walk.key();
#pragma unroll
                for (int i = 0; i < queries / 2; ++i) {
                    const int key = row + i / 2 % 2 * 8, query = i / 4 * 8 + place.column + i % 2;
                    if ((causal && key > query + diagonal) || key >= end) scores[i] = 0.0f;
                }
            }
            unsigned weights[queries / 16][4];
            pack(scores, weights);
            ptx::fence_products();
            if constexpr (!ahead) multiply_dweights(stage);
            multiply_rows<typename L::Results>(dv, weights, at.results_of(stage));
            ptx::wait_products<1>(); // dv's products may still be under way.
            ptx::settle(dweights);
#pragma unroll
            for (int j = 0; j < queries / 8; ++j) {
                const float2 along = *reinterpret_cast<const float2*>(numbers + queries + 8 * j + place.column);
#pragma unroll
                for (int h = 0; h < 2; ++h) { // rounded weights, whose registers are there anyway
                    const unsigned two = weights[j / 2][j % 2 * 2 + h];
                    float *x = dweights + 4 * j + 2 * h, low = __uint_as_float(two << 16);
                    x[0] = low * (x[0] - along.x);
                    x[1] = __uint_as_float(two & 0xffff0000u) * (x[1] - along.y);
                }
            }
            unsigned dscores[queries / 16][4];
            pack(dweights, dscores);
            const unsigned tile = at.scores(half);
            const int row = consumer * 64 + static_cast<int>(threadIdx.x) % 128 / warp_size * 16 + lane % 16;
#pragma unroll
            for (int j = 0; j < queries / 16; ++j) {
                const int pack_at = 2 * j + lane / 16;
                store_matrices(tile + pack_at / 8 * L::Scores::box_bytes + row * 128 + ((pack_at % 8 ^ row % 8) << 4),
                               dscores[j]);
            }
            ptx::fence_async_proxy();
            ptx::wait_products<0>();
            ptx::settle(dv);
            ptx::await_warpgroup(1); // Both warpgroups' score gradients are there.
            ptx::fence_products();
            // A warpgroup computes 64 queries of all columns, or 64 columns of all queries.
            constexpr bool by_rows = queries == 128;
            const unsigned left = tile + (by_rows ? consumer * L::Scores::box_bytes : 0);
            const auto multiply_dq = [&](auto& sums, unsigned columns) {
#pragma unroll
                for (int slice = 0; slice < keys_of_tile / 16; ++slice)
                    ptx::multiply<true, true>(sums, L::Scores::across_at(left, slice),
                                              L::Keys::across_at(columns, slice), slice);
                ptx::commit_products();
            };
            multiply_dq(dq, at.keys() + (by_rows ? 0 : consumer * L::Keys::box_bytes));
            ring.advance(stages);
            if constexpr (ahead) {
                multiply_rows<typename L::Queries>(dk, dscores, at.queries_of(stage));
                if (!walk.is_last()) ptx::wait(at.full(ring.stage), ring.parity);
                ptx::fence_products();
                multiply_scores(ring.stage); // Behind the last step they are of no use.
                ptx::wait_products<2>();
            } else {
                ptx::wait_products<0>();
            }
            ptx::settle(dq);
            if constexpr (!ahead) {
                // Beside the sums of dq. The left operand comes from shared memory: with score gradients in registers
                // there were too few of these, and the compiler made products wait for one another.
                ptx::fence_products();
#pragma unroll
                for (int slice = 0; slice < queries / 16; ++slice)
                    ptx::multiply<false, true>(dk, L::Scores::rows_at(tile, consumer * 64, slice),
                                               L::Queries::across_at(at.queries_of(stage), slice), 1);
                ptx::commit_products();
            }
            ptx::wait(at.turn_come(turns.stage), turns.parity);
            const std::uint64_t to = at.sums_of(turns.stage);
            const bool first = to % 2 != 0;
            float4* sums =
                reinterpret_cast<float4*>(to - to % 2) + consumer * (queries * qk_width / 8) + threadIdx.x % 128;
#pragma unroll
            for (int j = 0; j < 8; ++j) put_sums(sums + j * 128, dq + 4 * j, first);
            if constexpr (qk_width == 192) { // columns 128 on: 32 of each warpgroup
                auto& rest = reinterpret_cast<float(&)[16]>(dq);
                ptx::fence_products();
                multiply_dq(rest, at.keys() + 2 * L::Keys::box_bytes + consumer * 64);
                ptx::wait_products<0>();
                ptx::settle(rest);
#pragma unroll
                for (int j = 0; j < 4; ++j) put_sums(sums + (8 + j) * 128, dq + 4 * j, first);
            }
            __syncwarp();
            if (lane == 0) ptx::arrive(at.turn_over(turns.stage));
            turns.advance(turns_deep);
            ptx::wait_products<0>();
            ptx::settle(dk);
            if constexpr (ahead) ptx::settle(scores);
            if (lane == 0) ptx::arrive(at.empty(stage));
            half ^= 1;
        }
        if (lane == 0) ptx::arrive(at.keys_empty());
        if (!walk.ends_keys()) {
            move_kept<true>(in.kept, walk.pass(), dk);
            move_kept<true>(kept_dv, walk.pass(), dv);
            continue;
        }
        const float by_scale[2] = {static_cast<float>(s.scale), static_cast<float>(s.scale)}, by_one[2] = {1.0f, 1.0f};
        const std::int64_t key = walk.key() + consumer * 64;
        write_sums(in.dk, z.k(walk.sequence(), walk.key_head()), key, s.seq_k, s.qk_dim, by_scale, dk);
        write_sums(in.dv, z.v(walk.sequence(), walk.key_head()), key, s.seq_k, s.v_dim, by_one, dv);
    }
#endif
}

// Scratch of a call: sums of dq, two numbers of each row, kept sums of dk and dv, turns.
struct Scratch {
    std::int64_t rows, numbers, kept, turns, end; // rows: of all heads, in whole tiles; bytes from the start
    Scratch(const AttentionShape& s, const OrderedPlan& plan, int queries)
        : rows(std::int64_t{s.batch} * s.heads * plan.query_tiles * queries),
          numbers(rows * s.qk_dim * 4),
          kept(numbers + rows * 8),
          turns(kept + (plan.together * s.kv_heads < s.heads ? of_kept(s, plan) : 0)),
          end(turns + rows / queries * 4) {}

private:
    static std::int64_t of_kept(const AttentionShape& s, const OrderedPlan& plan) {
        return std::int64_t{plan.team} * plan.teams * 2 * keys_of_tile * (s.qk_dim + s.v_dim) * 4;
    }
};

bool is_exact(const AttentionShape& s) {
    return (s.qk_dim == 64 && s.v_dim == 64) || ((s.qk_dim == 128 || s.qk_dim == 192) && s.v_dim == 128);
}

int queries_of(const AttentionShape& s) { return s.qk_dim == 64 ? queries_of_tile<64> : queries_of_tile<128>; }

int l2_cache_bytes() {
    static const int bytes = [] { // The devices of one process are of one kind.
        int device = 0, found = 0;
        CUDA_CHECK(cudaGetDevice(&device));
        CUDA_CHECK(cudaDeviceGetAttribute(&found, cudaDevAttrL2CacheSize, device));
        return found;
    }();
    return bytes;
}

OrderedPlan plan_of(const AttentionShape& s, int multiprocessors) {
    OrderedPlan p{};
    p.key_tiles = ceil_div(static_cast<int>(s.seq_k), keys_of_tile);
    p.query_tiles = ceil_div(static_cast<int>(s.seq_q), queries_of(s));
    p.team = s.causal ? ceil_div(p.key_tiles, 2) : p.key_tiles;
    p.groups = static_cast<int>(s.batch) * s.kv_heads;
    p.teams = multiprocessors / p.team < p.groups ? multiprocessors / p.team : p.groups;
    p.shift = static_cast<int>(s.seq_k - s.seq_q);
    // What all teams read and add to of one query head: its queries, its results' gradients and the sums of dq.
    const std::int64_t head = std::int64_t{p.teams} * p.query_tiles * queries_of(s) * (6 * s.qk_dim + 2 * s.v_dim);
    p.together = static_cast<int>(
        std::clamp<std::int64_t>(std::int64_t{l2_cache_bytes()} * 7 / 5 / head, 1, s.heads / s.kv_heads));
    return p;
}

// All CTAs run at once, since they wait for one another: the launch waits until there is room for them.
template <int qk_width, int v_width, bool causal>
void launch(const Maps& maps, const AttentionSizes& z, const OrderedPlan& plan, const Operands& in,
            cudaStream_t stream) {
    constexpr int bytes = OrderedLayout<qk_width, v_width>::shared_bytes;
    const auto kernel = ordered_grad_kernel<qk_width, v_width, causal>;
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    cudaLaunchAttribute together{};
    together.id = cudaLaunchAttributeCooperative;
    together.val.cooperative = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(plan.team * plan.teams));
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = &together;
    config.numAttrs = 1;
    CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, maps, z, plan, in));
}

template <int qk_width, int v_width>
void run(const AttentionCall& c, const OrderedPlan& plan, Src dout, Src o, const float* lse, Dst dq, Dst dk, Dst dv,
         char* memory, cudaStream_t stream) {
    constexpr int queries = queries_of_tile<qk_width>;
    AttentionShape s = c.s;
    s.q_offset = s.k_offset = s.v_offset = 0; // The call's operands begin at their first element.
    const AttentionSizes z(s);
    const Scratch at(s, plan, queries);
    auto* numbers = reinterpret_cast<float*>(memory + at.numbers);
    const auto elements = [](Src x) { return static_cast<const __nv_bfloat16*>(x.data); };
    const RowPass rows{elements(dout), elements(o),      lse, c.lse_head, plan.query_tiles * queries,
                       numbers,        numbers + at.rows};
    CUDA_CHECK(cudaMemsetAsync(memory + at.turns, 0, static_cast<std::size_t>(at.end - at.turns), stream));
    rows_kernel<v_width><<<blocks_for(at.rows * (v_width / 8), row_threads), row_threads, 0, stream>>>(z, rows);
    CUDA_CHECK(cudaGetLastError());
    const Maps maps{
        map_of_heads<queries>(c.q.data, s.seq_q, s.heads, s.qk_dim, s.batch, z.q_stride),
        map_of_heads<keys_of_tile>(c.k.data, s.seq_k, s.kv_heads, s.qk_dim, s.batch, z.k_stride),
        map_of_heads<keys_of_tile>(c.v.data, s.seq_k, s.kv_heads, s.v_dim, s.batch, z.v_stride),
        map_of_heads<queries>(dout.data, s.seq_q, s.heads, s.v_dim, s.batch, std::int64_t{s.heads} * s.v_dim)};
    const Operands in{rows.lse2,
                      rows.along,
                      reinterpret_cast<float*>(memory),
                      reinterpret_cast<unsigned*>(memory + at.turns),
                      reinterpret_cast<float*>(memory + at.kept),
                      dk,
                      dv};
    (s.causal ? launch<qk_width, v_width, true> : launch<qk_width, v_width, false>)(maps, z, plan, in, stream);
    const dim3 tiles(static_cast<unsigned>(plan.query_tiles), static_cast<unsigned>(s.heads),
                     static_cast<unsigned>(s.batch));
    round_kernel<qk_width><<<tiles, row_threads, 0, stream>>>(s, plan.query_tiles, reinterpret_cast<float4*>(memory),
                                                              static_cast<__nv_bfloat16*>(dq.data),
                                                              c.dq_stride != 0 ? c.dq_stride : z.q_stride);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

std::int64_t ordered_attention_bytes(const AttentionCall& c) {
    const AttentionShape& s = c.s;
    const int multiprocessors = sm90::multiprocessors();
    if (multiprocessors == 0 || s.window > 0 || !is_exact(s) || (s.causal && s.seq_q > s.seq_k) ||
        !sm90::within_reach({}, {s.seq_q * s.batch, s.seq_k * s.batch}) || s.batch > 65535 || s.heads > 65535)
        return 0;
    const OrderedPlan p = plan_of(s, multiprocessors);
    if (p.teams == 0) return 0;
    // The library's own takes a quarter more time on all multiprocessors.
    const std::int64_t rounds = ceil_div(p.groups, p.teams), work = std::int64_t{p.groups} * p.team;
    if (5 * work < 4 * rounds * multiprocessors) return 0;
    return Scratch(s, p, queries_of(s)).end;
}

void ordered_attention_grad(const AttentionCall& c, Src dout, Src o, const float* lse, Dst dq, Dst dk, Dst dv,
                            char* memory, cudaStream_t stream) {
    const OrderedPlan plan = plan_of(c.s, sm90::multiprocessors());
    const auto with = c.s.qk_dim == 64 ? run<64, 64> : c.s.qk_dim == 128 ? run<128, 128> : run<192, 128>;
    with(c, plan, dout, o, lse, dq, dk, dv, memory, stream);
}

} // namespace moe::cuda
