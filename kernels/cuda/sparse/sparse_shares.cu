// What the heads of attention give every key of a row together, on Hopper's tensor cores: the target of an indexer's
// loss.
//
// Scores are made like attention's, 64 heads at a time, once for the logs of the sums and once more under them; the two
// warpgroups have 32 of a tile's 64 keys each and share nothing but the sums.
//
// Floor: 4 qk_dim FLOPs for every head of a row and key.
#include "kernels/cuda/sparse/sparse.hpp"
#include "kernels/cuda/sparse/sparse_tensor.cuh"

namespace moe::cuda {
namespace {

using namespace sparse_tensor;

struct Operands {
    LatentShape s;
    PickedKeys places;
    const __nv_bfloat16 *q, *k;
    const std::int32_t* keys; // null: all that a query sees
    float* shares;
    std::int64_t width;
};

template <int tile>
struct LayoutOf {
    static constexpr int query_bytes = sparse_tensor::tile_bytes(tile, wide), best_at = query_bytes * (1 + stages),
                         parts_at = best_at + consumers * 2 * tile * 4,
                         barriers_at = parts_at + 2 * consumers * 4 * 32 * 4,
                         shared_bytes = alignment + barriers_at + 64;
    unsigned start;

    __device__ explicit LayoutOf(const void* memory)
        : start((ptx::shared_address(memory) + alignment - 1) / alignment * alignment) {}
    __device__ unsigned queries() const { return start; }
    __device__ unsigned keys(int stage) const { return start + query_bytes * (1 + stage); }
    // A maximum and a sum of each warpgroup for each row.
    __device__ unsigned best(int warpgroup, int which, int row) const {
        return start + best_at + ((warpgroup * 2 + which) * tile + row) * 4;
    }
    // What each warp's heads give a warpgroup's keys.
    __device__ unsigned part(int turn, int warpgroup, int warp, int key) const {
        return start + parts_at + (((turn * consumers + warpgroup) * 4 + warp) * 32 + key) * 4;
    }
    __device__ unsigned queries_full() const { return start + barriers_at; }
    __device__ unsigned queries_empty() const { return start + barriers_at + 8; }
    __device__ unsigned full(int stage) const { return start + barriers_at + 8 * (2 + stage); }
    __device__ unsigned empty(int stage) const { return start + barriers_at + 8 * (2 + stages + stage); }
};
using Layout = LayoutOf<tile>;

enum Meeting : int { sums_known = 1, parts_there }; // and one more for the second warpgroup

template <class L>
__device__ void produce(const Operands& in, const L& at, const KeyPlaces& z, const KeyList& list, std::int64_t row,
                        int tiles) {
    const LatentShape& s = in.s;
    const int thread = static_cast<int>(threadIdx.x) % 128, turn = thread / loaders;
    int use = 0;
    for (int head = 0, round = 0; head < s.heads; head += tile, ++round) {
        ptx::wait(at.queries_empty(), static_cast<unsigned>(round % 2) ^ 1);
        copy_rows<tile, wide, 128>(at.queries(), thread, in.q + (row * s.heads + head) * wide,
                                   min(tile, s.heads - head));
        announce(at.queries_full());
        for (int item = 0; item < 2 * tiles; ++item, ++use) {
            if (stage_of(use) != turn) continue;
            TileRows<tile, loaders> keys;
            keys.find(thread % loaders,
                      [&](int i) { return row_of_key(z, list, std::int64_t{item % tiles} * tile + i); });
            ptx::wait(at.empty(turn), parity_of(use) ^ 1);
            keys.template copy<wide>(at.keys(turn), thread % loaders, in.k);
            announce(at.full(turn));
        }
    }
}

template <class L>
__device__ void consume(const Operands& in, const L& at, const KeyList& list, std::int64_t row, int tiles,
                        int warpgroup) {
    constexpr int own_keys = tile / consumers;
    const LatentShape& s = in.s;
    const Place place;
    const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % warp_size;
    const float scale = static_cast<float>(s.scale) * log2_e;
    float scores[own_keys / 2];
    int use = 0;
    const auto make_scores = [&](int t) {
        const int stage = stage_of(use);
        ptx::wait(at.full(stage), parity_of(use));
        ptx::fence_products();
        const unsigned keys = at.keys(stage) + warpgroup * own_keys * 128;
#pragma unroll
        for (int slice = 0; slice < wide / 16; ++slice)
            ptx::multiply<false, false>(scores, along_columns<tile>(at.queries(), slice),
                                        along_columns<tile>(keys, slice), slice);
        ptx::commit_products();
        ptx::wait_products<0>();
        ptx::settle(scores);
        if (lane == 0) ptx::arrive(at.empty(stage));
        ++use;
        const int left = static_cast<int>(list.count) - t * tile - warpgroup * own_keys - place.column;
        if ((t + 1) * tile > list.count) {
#pragma unroll
            for (int i = 0; i < own_keys / 2; ++i)
                if (i / 4 * 8 + i % 2 >= left) scores[i] = -INFINITY;
        }
    };
    float* const own = in.shares + row * in.width;
    for (int head = 0, round = 0; head < s.heads; head += tile, ++round) {
        ptx::wait(at.queries_full(), static_cast<unsigned>(round % 2));
        float most[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f}, log[2];
        for (int t = 0; t < tiles; ++t) {
            make_scores(t);
#pragma unroll
            for (int h = 0; h < 2; ++h) { // A lane's own columns only.
                float best = most[h];
#pragma unroll
                for (int j = 0; j < own_keys / 8; ++j)
                    best = fmaxf(best, fmaxf(scores[4 * j + 2 * h], scores[4 * j + 2 * h + 1]) * scale);
                const float base = best == -INFINITY ? 0.0f : best;
                float added = 0.0f;
#pragma unroll
                for (int j = 0; j < own_keys / 8; ++j)
                    added += exp2f(fmaf(scores[4 * j + 2 * h], scale, -base)) +
                             exp2f(fmaf(scores[4 * j + 2 * h + 1], scale, -base));
                sum[h] = sum[h] * exp2f(most[h] - base) + added;
                most[h] = best;
            }
        }
        const auto join = [](float& m, float& x, float other_m, float other_x) {
            const float best = fmaxf(m, other_m), base = best == -INFINITY ? 0.0f : best;
            x = x * exp2f(m - base) + other_x * exp2f(other_m - base);
            m = best;
        };
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int lanes = 1; lanes <= 2; lanes *= 2)
                join(most[h], sum[h], __shfl_xor_sync(all_lanes, most[h], lanes),
                     __shfl_xor_sync(all_lanes, sum[h], lanes));
            if (place.column == 0) {
                write_float(at.best(warpgroup, 0, place.row + 8 * h), most[h]);
                write_float(at.best(warpgroup, 1, place.row + 8 * h), sum[h]);
            }
        }
        ptx::await_warpgroup(sums_known);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int at_row = place.row + 8 * h;
            join(most[h], sum[h], read_float(at.best(1 - warpgroup, 0, at_row)),
                 read_float(at.best(1 - warpgroup, 1, at_row)));
            log[h] = head + at_row < s.heads ? most[h] + log2f(sum[h]) : INFINITY;
        }
        for (int t = 0; t < tiles; ++t) {
            make_scores(t);
#pragma unroll
            for (int j = 0; j < own_keys / 8; ++j) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float p = exp2f(fmaf(scores[4 * j + i], scale, -log[0])) +
                              exp2f(fmaf(scores[4 * j + 2 + i], scale, -log[1]));
#pragma unroll
                    for (int lanes = 4; lanes < warp_size; lanes *= 2) p += __shfl_xor_sync(all_lanes, p, lanes);
                    if (lane < 4)
                        write_float(at.part(t % 2, warpgroup, thread / warp_size, 8 * j + place.column + i), p);
                }
            }
            ptx::sync_warpgroup(parts_there + warpgroup);
            const std::int64_t key = std::int64_t{t} * tile + warpgroup * own_keys + thread;
            if (thread >= own_keys || key >= list.count) continue;
            float p = head == 0 ? 0.0f : own[key];
            for (int warp = 0; warp < 4; ++warp) p += read_float(at.part(t % 2, warpgroup, warp, thread));
            own[key] = p;
        }
        __syncwarp();
        if (lane == 0) ptx::arrive(at.queries_empty());
    }
}

__global__ void __launch_bounds__(threads, 1) share_kernel(Operands in) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ unsigned char memory[];
    const Layout at(memory);
    const KeyPlaces z{in.places};
    const std::int64_t row = z.rows() - 1 - blockIdx.x;
    const int warpgroup = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x / 128), 0);
    if (threadIdx.x == 0) {
        ptx::init_barrier(at.queries_full(), 128);
        ptx::init_barrier(at.queries_empty(), 4 * consumers);
        for (int stage = 0; stage < stages; ++stage) {
            ptx::init_barrier(at.full(stage), loaders);
            ptx::init_barrier(at.empty(stage), 4 * consumers);
        }
        ptx::fence_barrier_init();
    }
    __syncthreads();
    const KeyList list(z, in.keys, row);
    const int tiles = static_cast<int>(ceil_div<std::int64_t>(list.count, tile));
    if (tiles == 0) return;
    if (warpgroup == 0)
        produce(in, at, z, list, row, tiles);
    else
        consume(in, at, list, row, tiles, warpgroup - 1);
#endif
}

} // namespace

void find_shares(const IndexLossShape& s, Src q, Src k, const std::int32_t* keys, float* shares, cudaStream_t stream) {
    const Operands in{s.core,
                      s.index.keys,
                      static_cast<const __nv_bfloat16*>(q.data),
                      static_cast<const __nv_bfloat16*>(k.data),
                      s.all_keys ? nullptr : keys,
                      shares,
                      s.width()};
    CUDA_CHECK(cudaFuncSetAttribute(share_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout::shared_bytes));
    share_kernel<<<blocks_for(s.index.keys.rows(), 1), threads, Layout::shared_bytes, stream>>>(in);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace moe::cuda
