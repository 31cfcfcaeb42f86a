// Attention over picked keys on Hopper's tensor cores: a CTA takes 64 heads of a row over the keys of its list.
//
// The two warpgroups have 32 of a tile's 64 keys each when scores are made, and 256 of the value's columns each when
// values are added up, so that between them go the maxima of rows and the weights. The value is the key's first
// columns: a key is loaded once for both products. Scores of the next tile are under way while the weights of the one
// before are multiplied.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/sparse/sparse.hpp"
#include "kernels/cuda/sparse/sparse_tensor.cuh"

namespace moe::cuda {
namespace {

using namespace sparse_tensor;

template <int tile>
struct LayoutOf {
    static constexpr int query_bytes = tile_bytes(tile, wide), weights_at = query_bytes * (1 + stages),
                         best_at = weights_at + tile_bytes(tile, 64), barriers_at = best_at + consumers * tile * 4,
                         shared_bytes = alignment + barriers_at + 64;
    unsigned start;

    __device__ explicit LayoutOf(const void* memory)
        : start((ptx::shared_address(memory) + alignment - 1) / alignment * alignment) {}
    __device__ unsigned queries() const { return start; }
    __device__ unsigned keys(int stage) const { return start + query_bytes * (1 + stage); }
    __device__ unsigned weights() const { return start + weights_at; }
    __device__ unsigned queries_full() const { return start + barriers_at; }
    __device__ unsigned full(int stage) const { return start + barriers_at + 8 * (1 + stage); }
    __device__ unsigned empty(int stage) const { return start + barriers_at + 8 * (1 + stages + stage); }
    // A number of each warpgroup for each row.
    __device__ unsigned best(int warpgroup, int row) const { return start + best_at + (warpgroup * tile + row) * 4; }
};

using Layout = LayoutOf<tile>;

struct Operands {
    LatentShape s;
    const __nv_bfloat16 *q, *k;
    const std::int32_t* keys;
    __nv_bfloat16* o;
    float* lse;
};

enum Meeting : int { bests_known = 1, weights_there };

template <class L>
__device__ void produce(const Operands& in, const L& at, const KeyPlaces& z, const KeyList& list, std::int64_t row,
                        int head, int tiles) {
    const int thread = static_cast<int>(threadIdx.x) % 128, turn = thread / loaders;
    copy_rows<tile, wide, 128>(at.queries(), thread, in.q + (row * in.s.heads + head) * wide,
                               min(tile, in.s.heads - head));
    TileRows<tile, loaders> keys;
    const auto find = [&](int t) {
        keys.find(thread % loaders, [&](int i) { return row_of_key(z, list, std::int64_t{t} * tile + i); });
    };
    if (turn < tiles) find(turn);
    announce(at.queries_full());
    for (int t = turn; t < tiles; t += stages) {
        const int stage = stage_of(t);
        ptx::wait(at.empty(stage), parity_of(t) ^ 1);
        keys.template copy<wide>(at.keys(stage), thread % loaders, in.k);
        find(t + stages);
        announce(at.full(stage));
    }
}

// The softmax of a thread's two rows over its warpgroup's keys, to the base 2, under the maxima of both.
struct Running {
    float max[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
};

template <class L>
__device__ void consume(const Operands& in, const L& at, const KeyList& list, std::int64_t row, int head, int tiles,
                        int warpgroup) {
    constexpr int own_keys = tile / consumers, own_columns = value_wide / consumers;
    const Place place;
    const bool speaks = threadIdx.x % warp_size == 0;
    const float scale = static_cast<float>(in.s.scale) * log2_e;
    float out[own_columns / 2], scores[own_keys / 2], factor[2];
#pragma unroll
    for (float& x : out) x = 0.0f;
    Running running;
    const auto begin_scores = [&](int t) {
        ptx::wait(at.full(stage_of(t)), parity_of(t));
        ptx::fence_products();
        const unsigned keys = at.keys(stage_of(t)) + warpgroup * own_keys * 128;
#pragma unroll
        for (int slice = 0; slice < wide / 16; ++slice)
            ptx::multiply<false, false>(scores, along_columns<tile>(at.queries(), slice),
                                        along_columns<tile>(keys, slice), slice);
        ptx::commit_products();
    };
    // Scores become weights, and what earlier sums are multiplied by.
    const auto soften = [&](int t) {
        const int first = t * tile + warpgroup * own_keys + place.column;
        if ((t + 1) * tile > list.count) {
#pragma unroll
            for (int i = 0; i < own_keys / 2; ++i)
                if (first + i / 4 * 8 + i % 2 >= list.count) scores[i] = -INFINITY;
        }
        float best[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            best[h] = -INFINITY;
#pragma unroll
            for (int j = 0; j < own_keys / 8; ++j)
                best[h] = fmaxf(best[h], fmaxf(scores[4 * j + 2 * h], scores[4 * j + 2 * h + 1]));
            best[h] = fmaxf(best[h], __shfl_xor_sync(all_lanes, best[h], 1));
            best[h] = fmaxf(best[h], __shfl_xor_sync(all_lanes, best[h], 2));
            if (place.column == 0) write_float(at.best(warpgroup, place.row + 8 * h), best[h]);
        }
        ptx::await_warpgroup(bests_known);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            best[h] = fmaxf(best[h], read_float(at.best(1 - warpgroup, place.row + 8 * h)));
            best[h] = fmaxf(running.max[h], best[h] * scale);
            const float base = best[h] == -INFINITY ? 0.0f : best[h];
            factor[h] = exp2f(running.max[h] - base);
            running.max[h] = best[h];
            float added = 0.0f;
#pragma unroll
            for (int j = 0; j < own_keys / 8; ++j) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    float& x = scores[4 * j + 2 * h + i];
                    x = exp2f(fmaf(x, scale, -base));
                    added += x;
                }
            }
            running.sum[h] = running.sum[h] * factor[h] + added;
        }
    };
    const auto write_weights = [&] {
#pragma unroll
        for (int j = 0; j < own_keys / 8; ++j) {
#pragma unroll
            for (int h = 0; h < 2; ++h)
                write_two(swizzled(at.weights(), place.row + 8 * h, warpgroup * own_keys + 8 * j + place.column),
                          pack_two(scores[4 * j + 2 * h], scores[4 * j + 2 * h + 1]));
        }
        ptx::fence_async_proxy();
        ptx::await_warpgroup(weights_there);
    };

    const auto begin_values = [&](int t) {
        ptx::fence_products();
        const unsigned values = at.keys(stage_of(t)) + warpgroup * (own_columns / 64) * box_bytes(tile);
#pragma unroll
        for (int slice = 0; slice < tile / 16; ++slice)
            ptx::multiply<false, true>(out, along_columns<tile>(at.weights(), slice), along_rows<tile>(values, slice),
                                       1);
        ptx::commit_products();
    };

    ptx::wait(at.queries_full(), 0);
    for (int t = 0; t < tiles; ++t) {
        begin_scores(t);
        ptx::wait_products<0>();
        ptx::settle(scores);
        soften(t); // Where maxima meet, both have done with the weights before.
#pragma unroll
        for (int i = 0; i < own_columns / 2; ++i) out[i] *= factor[i / 2 % 2];
        write_weights();
        begin_values(t);
        ptx::wait_products<0>();
        ptx::settle(out);
        if (speaks) ptx::arrive(at.empty(stage_of(t)));
    }
    float over[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        running.sum[h] += __shfl_xor_sync(all_lanes, running.sum[h], 1);
        running.sum[h] += __shfl_xor_sync(all_lanes, running.sum[h], 2);
        if (place.column == 0) write_float(at.best(warpgroup, place.row + 8 * h), running.sum[h]);
    }
    ptx::await_warpgroup(bests_known);
    const std::int64_t rows = KeyPlaces{in.s.keys}.rows();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        // The same order in both warpgroups.
        const float sum = read_float(at.best(0, place.row + 8 * h)) + read_float(at.best(1, place.row + 8 * h));
        over[h] = sum > 0.0f ? 1.0f / sum : 0.0f;
        const int own = head + place.row + 8 * h;
        if (own >= in.s.heads) continue;
        if (warpgroup == 0 && place.column == 0)
            in.lse[own * rows + row] = sum > 0.0f ? running.max[h] * ln_2 + logf(sum) : -INFINITY;
        auto* to = reinterpret_cast<__nv_bfloat162*>(in.o + (row * in.s.heads + own) * value_wide +
                                                     warpgroup * own_columns + place.column);
#pragma unroll
        for (int j = 0; j < own_columns / 8; ++j)
            to[4 * j] = __floats2bfloat162_rn(out[4 * j + 2 * h] * over[h], out[4 * j + 2 * h + 1] * over[h]);
    }
}

__global__ void __launch_bounds__(threads, 1) attend_kernel(Operands in, int head_tiles) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ unsigned char memory[];
    const Layout at(memory);
    const KeyPlaces z{in.s.keys};
    // Rows that come last have the longest lists.
    const std::int64_t row = z.rows() - 1 - blockIdx.x / head_tiles;
    const int head = static_cast<int>(blockIdx.x % head_tiles) * tile;
    const int warpgroup = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x / 128), 0);
    if (threadIdx.x == 0) {
        ptx::init_barrier(at.queries_full(), 128);
        for (int stage = 0; stage < stages; ++stage) {
            ptx::init_barrier(at.full(stage), loaders);
            ptx::init_barrier(at.empty(stage), 4 * consumers);
        }
        ptx::fence_barrier_init();
    }
    __syncthreads();
    const KeyList list(z, in.keys, row);
    const int tiles = static_cast<int>(ceil_div<std::int64_t>(list.count, tile));
    if (warpgroup == 0) {
        ptx::give_registers<88>();
        produce(in, at, z, list, row, head, tiles);
    } else {
        ptx::take_registers<208>();
        consume(in, at, list, row, head, tiles, warpgroup - 1);
    }
#endif
}

decltype(Kernels::attention_picked) plain = nullptr; // what the table held before

void attention_picked(const LatentShape& s, Src q, Src k, const std::int32_t* keys, Dst o, float* lse, void* stream) {
    if (!takes(s, keys, {q, k, Src{o.data, o.type}})) return plain(s, q, k, keys, o, lse, stream);
    if (s.keys.rows() <= 0 || s.heads <= 0) return;
    const Operands in{s,    static_cast<const __nv_bfloat16*>(q.data), static_cast<const __nv_bfloat16*>(k.data),
                      keys, static_cast<__nv_bfloat16*>(o.data),       lse};
    const int head_tiles = ceil_div(s.heads, tile);
    CUDA_CHECK(cudaFuncSetAttribute(attend_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Layout::shared_bytes));
    attend_kernel<<<blocks_for(s.keys.rows() * head_tiles, 1), threads, Layout::shared_bytes, stream_of(stream)>>>(
        in, head_tiles);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_tensor_sparse(Kernels& table) {
    plain = table.attention_picked;
    table.attention_picked = attention_picked;
}

} // namespace moe::cuda
