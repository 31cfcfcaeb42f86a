// Gradients of attention over picked keys on Hopper's tensor cores: sums of do o, then keys (sparse_tensor_keys.cu),
// then queries, of which a CTA takes 64 heads of a row over the keys of its list.
//
// Floor: 2 (2 qk_dim + v_dim) FLOPs for every head of a row and picked key.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/sparse/sparse.hpp"
#include "kernels/cuda/sparse/sparse_tensor_grad.cuh"

namespace moe::cuda {
namespace {

using namespace sparse_tensor;

template <bool second, class L>
__device__ void consume_query(const GradOperands& in, const L& at, const KeyList& list, std::int64_t row, int head,
                              int items) {
    const Place place;
    const std::int64_t rows = KeyPlaces{in.s.keys}.rows();
    const float scale = static_cast<float>(in.s.scale);
    float logs[2], along[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int own = head + place.row + 8 * h;
        const bool there = own < in.s.heads;
        logs[h] = there ? in.lse[own * rows + row] * log2_e : INFINITY;
        along[h] = there ? *in.along(row * in.s.heads + own) : 0.0f;
    }
    const unsigned stay = at.start + (second ? wide_bytes : 0);
    Sums<second> sums;
    ptx::wait(at.stay_full(), 0);
    go_over<second, false>(
        at, sums, 0, items,
        [&](float(&products)[stream_rows / 2], int stage) { begin_products<second>(products, stay, at.stage(stage)); },
        [&](int item, int, const float(&products)[stream_rows / 2], unsigned(&words)[stream_rows / 4]) {
            const int left = static_cast<int>(list.count) - item * stream_rows - place.column;
            soften<second>(
                at, products, scale, [&](int i) { return logs[i / 2 % 2]; }, [&](int i) { return along[i / 2 % 2]; },
                [&](int i) { return i / 4 * 8 + i % 2 < left; }, words);
        },
        [&](int stage) { sums.add(at.weights(), 2, at.stage(stage), true); });
    // The other warpgroup has read the sums of do o that lie here.
    ptx::await_warpgroup(weights_there);
    sums.each([&](int own, int column, float2 two) {
        if (head + own >= in.s.heads) return;
        *reinterpret_cast<__nv_bfloat162*>(in.dq + (row * in.s.heads + head + own) * wide + column) =
            __floats2bfloat162_rn(two.x, two.y);
    });
}

template <class L>
__device__ void produce_query(const GradOperands& in, const L& at, const KeyPlaces& z, const KeyList& list,
                              std::int64_t row, int head, int items) {
    const int thread = static_cast<int>(threadIdx.x) % 128, turn = thread / loaders;
    const int heads = min(tile, in.s.heads - head);
    const std::int64_t first = row * in.s.heads + head;
    copy_rows<tile, wide, 128>(at.start, thread, in.q + first * wide, heads);
    copy_rows<tile, value_wide, 128>(at.start + wide_bytes, thread, in.dout + first * value_wide, heads);
    TileRows<stream_rows, loaders> keys;
    const auto find = [&](int t) {
        keys.find(thread % loaders, [&](int i) { return row_of_key(z, list, std::int64_t{t} * stream_rows + i); });
    };
    if (turn < items) find(turn);
    announce(at.stay_full());
    for (int t = turn; t < items; t += stages) {
        const int stage = stage_of(t);
        ptx::wait(at.empty(stage), parity_of(t) ^ 1);
        keys.template copy<wide>(at.stage(stage), thread % loaders, in.k);
        find(t + stages);
        announce(at.full(stage));
    }
}

__global__ void __launch_bounds__(threads, 1) query_grad_kernel(GradOperands in, int head_tiles) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ unsigned char memory[];
    const QueryLayout at(memory);
    const KeyPlaces z{in.s.keys};
    const std::int64_t row = z.rows() - 1 - blockIdx.x / head_tiles;
    const int head = static_cast<int>(blockIdx.x % head_tiles) * tile;
    const int warpgroup = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x / 128), 0);
    at.begin();
    const KeyList list(z, in.keys, row);
    const int items = static_cast<int>(ceil_div<std::int64_t>(list.count, stream_rows));
    if (warpgroup == 0) {
        ptx::give_registers<56>();
        produce_query(in, at, z, list, row, head, items);
    } else {
        ptx::take_registers<224>();
        if (warpgroup == 1)
            consume_query<false>(in, at, list, row, head, items);
        else
            consume_query<true>(in, at, list, row, head, items);
    }
#endif
}

// A warp has a head of a row.
__global__ void __launch_bounds__(256) along_kernel(GradOperands in, const __nv_bfloat16* o, std::int64_t heads) {
    const std::int64_t head = std::int64_t{blockIdx.x} * 8 + threadIdx.x / warp_size;
    if (head >= heads) return;
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < value_wide / 64; ++i) {
        const std::int64_t at = head * (value_wide / 2) + i * warp_size + lane;
        const float2 x = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(in.dout)[at]),
                     y = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(o)[at]);
        sum += x.x * y.x + x.y * y.y;
    }
    sum = warp_sum(sum);
    if (lane == 0) *in.along(head) = sum;
}

decltype(Kernels::attention_picked_grad) plain = nullptr; // what the table held before

void attention_picked_grad(const LatentShape& s, Src dout, Src q, Src k, Src o, const float* lse,
                           const std::int32_t* keys, Dst dq, Dst dk, void* stream) {
    if (!takes(s, keys, {dout, q, k, o, Src{dq.data, dq.type}, Src{dk.data, dk.type}}))
        return plain(s, dout, q, k, o, lse, keys, dq, dk, stream);
    const PickedKeys& z = s.keys;
    if (z.rows() <= 0 || s.heads <= 0) return;
    const auto bf16 = [](Src x) { return static_cast<const __nv_bfloat16*>(x.data); };
    const GradOperands in{s,
                          bf16(dout),
                          bf16(q),
                          bf16(k),
                          lse,
                          keys,
                          static_cast<__nv_bfloat16*>(dq.data),
                          static_cast<__nv_bfloat16*>(dk.data)};
    const std::int64_t heads = z.rows() * s.heads;
    along_kernel<<<blocks_for(heads, 8), 256, 0, stream_of(stream)>>>(in, bf16(o), heads);
    CUDA_CHECK(cudaGetLastError());

    add_up_keys(in, stream_of(stream));

    // Writes over the sums that the kernels before have read.
    const int head_tiles = ceil_div(s.heads, tile);
    CUDA_CHECK(cudaFuncSetAttribute(query_grad_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    QueryLayout::shared_bytes));
    query_grad_kernel<<<blocks_for(z.rows() * head_tiles, 1), threads, QueryLayout::shared_bytes, stream_of(stream)>>>(
        in, head_tiles);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace

void add_tensor_sparse_grad(Kernels& table) {
    plain = table.attention_picked_grad;
    table.attention_picked_grad = attention_picked_grad;
}

} // namespace moe::cuda
