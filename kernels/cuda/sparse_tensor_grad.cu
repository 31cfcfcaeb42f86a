// Gradients of attention over picked keys on Hopper's tensor cores: of queries by rows, of keys by tiles of positions.
//
// Both kernels hold 64 rows and let 32 at a time stream past: 64 heads of a row and the keys of its list, or the keys
// at 64 positions and the heads of every row that has one of them. One warpgroup makes the weights P from the scores,
// the other dS = P (dP - sum of do o) from the products with the value, and both add up their columns of dS K, or of
// dS^T Q + P^T dO. A tile of keys goes over all its rows in order, so that its gradient has the same bits every time:
// the CTAs of a cluster take the rows in turn and add their sums in the order of their ranks.
//
// Floor: 2 (3 qk_dim + 2 v_dim) FLOPs for every head of a row and picked key, and the scores and products with values
// once more; in tiles of keys for all 64 of which a row has one.
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/sparse.hpp"
#include "kernels/cuda/sparse_tensor.cuh"

namespace moe::cuda {
namespace {

using namespace sparse_tensor;

constexpr int stream_rows = 32, batch_rows = 128;

struct Operands {
    LatentShape s;
    const __nv_bfloat16 *dout, *q, *k;
    const float* lse;
    const std::int32_t* keys;
    __nv_bfloat16 *dq, *dk;

    // The sum of do o of a head waits where the first columns of its dq will be.
    __device__ float* along(std::int64_t head) const { return reinterpret_cast<float*>(dq + head * wide); }
};

// Shared memory: what stays, the stages, [P | dS] of 32 columns each, P on its way to the other warpgroup, logs of sums
// and sums of do o of a stage's heads, the rows of a batch that have keys of the tile.
template <int stay_bytes, int stage_bytes>
struct LayoutOf {
    static constexpr int weights_at = stay_bytes + stages * stage_bytes, passed_at = weights_at + tile_bytes(tile, 64),
                         numbers_at = passed_at + 4 * 128 * 8, masks_at = numbers_at + stages * 2 * stream_rows * 4,
                         rows_at = masks_at + batch_rows * 8, counts_at = rows_at + batch_rows * 4,
                         barriers_at = counts_at + 32, shared_bytes = alignment + barriers_at + 64;
    static constexpr int sum_stride = wide + 8; // floats of a row of the sums that a cluster adds
    static_assert(tile * sum_stride * 4 <= weights_at && shared_bytes <= 232448);
    unsigned start;

    __device__ explicit LayoutOf(const void* memory)
        : start((ptx::shared_address(memory) + alignment - 1) / alignment * alignment) {}
    __device__ unsigned stage(int i) const { return start + stay_bytes + i * stage_bytes; }
    __device__ unsigned weights() const { return start + weights_at; }
    __device__ unsigned passed(int i) const {
        return start + passed_at + (i * 128 + static_cast<int>(threadIdx.x) % 128) * 4;
    }
    __device__ unsigned number(int stage, int which, int head) const {
        return start + numbers_at + ((stage * 2 + which) * stream_rows + head) * 4;
    }
    __device__ unsigned mask(int i) const { return start + masks_at + i * 8; }
    __device__ unsigned row(int i) const { return start + rows_at + i * 4; }
    __device__ unsigned count(int i) const { return start + counts_at + i * 4; }
    __device__ unsigned stay_full() const { return start + barriers_at; }
    __device__ unsigned full(int stage) const { return start + barriers_at + 8 * (1 + stage); }
    __device__ unsigned empty(int stage) const { return start + barriers_at + 8 * (1 + stages + stage); }
    __device__ unsigned sum(int row, int column) const { return start + (row * sum_stride + column) * 4; }

    __device__ void begin() const {
        if (threadIdx.x == 0) {
            ptx::init_barrier(stay_full(), 128);
            for (int stage = 0; stage < stages; ++stage) {
                ptx::init_barrier(full(stage), loaders);
                ptx::init_barrier(empty(stage), 4 * consumers);
            }
            ptx::fence_barrier_init();
        }
        __syncthreads();
    }
};

constexpr int wide_bytes = tile_bytes(tile, wide), value_bytes = tile_bytes(tile, value_wide),
              wide_stage = tile_bytes(stream_rows, wide), value_stage = tile_bytes(stream_rows, value_wide);
using QueryLayout = LayoutOf<wide_bytes + value_bytes, wide_stage>;
using KeyLayout = LayoutOf<wide_bytes, wide_stage + value_stage>;

enum Meeting : int { weights_passed = 1, weights_read, weights_there, rows_counted };

// The sums of a warpgroup's columns: the first 256 or, of the second, the 320 others.
template <bool second>
struct Sums {
    static constexpr int tail_columns = second ? wide - 512 : 0, first_box = second ? 4 : 0;
    float out[128], tail[second ? tail_columns / 2 : 1];

    __device__ Sums() {
#pragma unroll
        for (float& x : out) x = 0.0f;
#pragma unroll
        for (float& x : tail) x = 0.0f;
    }
    // Adds slices of the weights, from `slice` on, times the 32 rows of a stage's tile; under way when this returns.
    __device__ void add(unsigned weights, int slice, unsigned rows, bool with_tail) {
#pragma unroll
        for (int i = 0; i < stream_rows / 16; ++i) {
            const std::uint64_t left = along_columns<tile>(weights, slice + i);
            ptx::multiply<false, true>(out, left, along_rows<stream_rows>(rows + first_box * box_bytes(stream_rows), i),
                                       1);
            if constexpr (second)
                if (with_tail)
                    ptx::multiply<false, true>(tail, left,
                                               along_rows<stream_rows>(rows + 8 * box_bytes(stream_rows), i), 1);
        }
    }
    __device__ void settle() {
        ptx::settle(out);
        if constexpr (second) ptx::settle(tail);
    }
    // Calls with a row and two columns of the sums.
    template <class Write>
    __device__ void each(Write write) const {
        const Place place;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int j = 0; j < 32; ++j)
                write(place.row + 8 * h, first_box * 64 + 8 * j + place.column,
                      float2{out[4 * j + 2 * h], out[4 * j + 2 * h + 1]});
            if constexpr (second) {
#pragma unroll
                for (int j = 0; j < tail_columns / 8; ++j)
                    write(place.row + 8 * h, 512 + 8 * j + place.column,
                          float2{tail[4 * j + 2 * h], tail[4 * j + 2 * h + 1]});
            }
        }
    }
};

// Products of 64 rows and the 32 of a stage: scores over all columns, or those with values; under way.
template <bool values>
__device__ void begin_products(float (&d)[stream_rows / 2], unsigned stay, unsigned stream) {
    ptx::fence_products();
#pragma unroll
    for (int slice = 0; slice < (values ? value_wide : wide) / 16; ++slice)
        ptx::multiply<false, false>(d, along_columns<tile>(stay, slice), along_columns<stream_rows>(stream, slice),
                                    slice);
    ptx::commit_products();
}

// What a warpgroup makes of its products: the first passes P on, the second turns it into dS. `log_of` and `along_of`
// give the log of a sum (to the base 2) and the sum of do o for element i; `real` whether it has a weight at all.
template <bool second, class L, class Log, class Along, class Real>
__device__ void soften(const L& at, const float (&products)[stream_rows / 2], float scale, const Log& log_of,
                       const Along& along_of, const Real& real, unsigned (&words)[stream_rows / 4]) {
    if constexpr (second) ptx::await_warpgroup(weights_passed);
#pragma unroll
    for (int i = 0; i < stream_rows / 4; ++i) { // element 2 i and the next: row h = i % 2
        if constexpr (second) {
            const float2 p = unpack_two(read_word(at.passed(i)));
            words[i] = pack_two(p.x * (products[2 * i] - along_of(2 * i)) * scale,
                                p.y * (products[2 * i + 1] - along_of(2 * i + 1)) * scale);
        } else {
            const float by = scale * log2_e;
            const float first = real(2 * i) ? exp2f(fmaf(products[2 * i], by, -log_of(2 * i))) : 0.0f;
            const float next = real(2 * i + 1) ? exp2f(fmaf(products[2 * i + 1], by, -log_of(2 * i + 1))) : 0.0f;
            words[i] = pack_two(first, next);
            write_two(at.passed(i), words[i]);
        }
    }
    if constexpr (!second) ptx::release_warpgroup(weights_passed);
}

// Half of [P | dS].
template <class L>
__device__ void write_half(const L& at, int half, const unsigned (&words)[stream_rows / 4]) {
    const Place place;
#pragma unroll
    for (int i = 0; i < stream_rows / 4; ++i)
        write_two(swizzled(at.weights(), place.row + 8 * (i % 2), half * stream_rows + i / 2 * 8 + place.column),
                  words[i]);
    ptx::fence_async_proxy();
}

// Goes over `items` of the stream, of which `used` came before. `begin`(products, stage) multiplies, `make`(item,
// stage, products, words) softens, `add`(stage) adds. `both`: P is an operand of the sums too.
template <bool second, bool both, class L, class Begin, class Make, class Add>
__device__ void go_over(const L& at, Sums<second>& sums, int used, int items, const Begin& begin, const Make& make,
                        const Add& add) {
    const bool speaks = threadIdx.x % warp_size == 0;
    float products[stream_rows / 2];
    unsigned words[stream_rows / 4];
    for (int item = 0; item < items; ++item) {
        const int use = used + item, stage = stage_of(use);
        ptx::wait(at.full(stage), parity_of(use));
        begin(products, stage);
        ptx::wait_products<0>();
        ptx::settle(products);
        if (both && second) ptx::release_warpgroup(weights_read); // of the item before
        make(item, stage, products, words);
        if (both && !second) ptx::await_warpgroup(weights_read);
        if (second || both) write_half(at, second ? 1 : 0, words);
        ptx::await_warpgroup(weights_there);
        ptx::fence_products();
        add(stage);
        ptx::commit_products();
        ptx::wait_products<0>();
        sums.settle();
        if (speaks) ptx::arrive(at.empty(stage));
    }
}

template <bool second, class L>
__device__ void consume_query(const Operands& in, const L& at, const KeyList& list, std::int64_t row, int head,
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
__device__ void produce_query(const Operands& in, const L& at, const KeyPlaces& z, const KeyList& list,
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

__global__ void __launch_bounds__(threads, 1) query_grad_kernel(Operands in, int head_tiles) {
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

// The rows of a CTA that are one batch, and the tile of keys.
struct Walk {
    std::int64_t tile_first, sequence;
    int rank, ctas, batches, chunks;
};

// The producers' threads have a row each. Those that have keys of the tile are counted; their masks and queries are
// then in order in shared memory.
template <class L>
__device__ void find_rows(const Operands& in, const L& at, const KeyPlaces& z, const Walk& walk, int batch) {
    const int thread = static_cast<int>(threadIdx.x);
    const std::int64_t query = (std::int64_t{batch} * batch_rows + thread) * walk.ctas + walk.rank;
    unsigned long long mask = 0;
    if (query < z.s.seq_q && z.position(query) >= walk.tile_first)
        mask = KeyList(z, in.keys, query * z.s.batch + walk.sequence).within(walk.tile_first).mask;
    const unsigned some = __ballot_sync(all_lanes, mask != 0);
    __syncthreads(); // The batch before has been read.
    if (thread % warp_size == 0) write_two(at.count(thread / warp_size), static_cast<unsigned>(__popc(some)));
    ptx::sync_warpgroup(rows_counted);
    int before = __popc(some & ((1u << thread % warp_size) - 1)), all = 0;
    for (int warp = 0; warp < 4; ++warp) {
        const int there = static_cast<int>(read_word(at.count(warp)));
        if (warp < thread / warp_size) before += there;
        all += there;
    }
    if (mask != 0) {
        write_two(at.mask(before), static_cast<unsigned>(mask));
        write_two(at.mask(before) + 4, static_cast<unsigned>(mask >> 32));
        write_two(at.row(before), static_cast<unsigned>(query));
    }
    if (thread == 0) write_two(at.count(4), static_cast<unsigned>(all));
    __syncthreads();
}

template <class L>
__device__ void produce_rows(const Operands& in, const L& at, const KeyPlaces& z, const Walk& walk) {
    const int thread = static_cast<int>(threadIdx.x) % 128, turn = thread / loaders, own = thread % loaders;
    TileRows<tile, 128> keys;
    keys.find(thread, [&](int i) {
        const std::int64_t position = walk.tile_first + i;
        return position < z.s.seq_k ? static_cast<int>(z.row_of(position, walk.sequence)) : -1;
    });
    keys.template copy<wide>(at.start, thread, in.k);
    announce(at.stay_full());
    int used = 0;
    const std::int64_t rows = z.rows();
    for (int batch = 0; batch < walk.batches; ++batch) {
        find_rows(in, at, z, walk, batch);
        const int items = static_cast<int>(read_word(at.count(4))) * walk.chunks;
        for (int item = 0; item < items; ++item) {
            const int use = used + item, stage = stage_of(use);
            if (stage != turn) continue;
            const std::int64_t row = std::int64_t{read_word(at.row(item / walk.chunks))} * z.s.batch + walk.sequence;
            const int head = item % walk.chunks * stream_rows, heads = min(stream_rows, in.s.heads - head);
            const std::int64_t first = row * in.s.heads + head;
            ptx::wait(at.empty(stage), parity_of(use) ^ 1);
            copy_rows<stream_rows, wide, loaders>(at.stage(stage), own, in.q + first * wide, heads);
            copy_rows<stream_rows, value_wide, loaders>(at.stage(stage) + wide_stage, own, in.dout + first * value_wide,
                                                        heads);
            if (own < stream_rows) {
                const bool there = own < heads;
                write_float(at.number(stage, 0, own), there ? in.lse[(head + own) * rows + row] * log2_e : INFINITY);
                write_float(at.number(stage, 1, own), there ? *in.along(first + own) : 0.0f);
            }
            announce(at.full(stage));
        }
        used += items;
    }
}

template <bool second, class L>
__device__ void consume_rows(const Operands& in, const L& at, const KeyPlaces& z, const Walk& walk) {
    const Place place;
    const float scale = static_cast<float>(in.s.scale);
    Sums<second> sums;
    ptx::wait(at.stay_full(), 0);
    int used = 0;
    for (int batch = 0; batch < walk.batches; ++batch) {
        __syncthreads();
        __syncthreads();
        const int items = static_cast<int>(read_word(at.count(4))) * walk.chunks;
        go_over<second, true>(
            at, sums, used, items,
            [&](float(&products)[stream_rows / 2], int stage) {
                begin_products<second>(products, at.start, at.stage(stage) + (second ? wide_stage : 0));
            },
            [&](int item, int stage, const float(&products)[stream_rows / 2], unsigned(&words)[stream_rows / 4]) {
                const unsigned mask = read_word(at.mask(item / walk.chunks) + (place.row + 0) / 32 * 4) >>
                                      place.row % 32; // of the thread's rows bits 0 and 8, which lie in one word
                const auto number = [&](int which, int i) {
                    return read_float(at.number(stage, which, i / 4 * 8 + place.column + i % 2));
                };
                soften<second>(
                    at, products, scale, [&](int i) { return number(0, i); }, [&](int i) { return number(1, i); },
                    [&](int i) { return (mask >> (8 * (i / 2 % 2)) & 1) != 0; }, words);
            },
            [&](int stage) {
                sums.add(at.weights(), 0, at.stage(stage) + wide_stage, false);
                sums.add(at.weights(), 2, at.stage(stage), true);
            });
        used += items;
    }
    ptx::await_warpgroup(weights_there); // Both have done with the tiles.
    sums.each([&](int row, int column, float2 two) {
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at.sum(row, column)), "f"(two.x), "f"(two.y) : "memory");
    });
    ptx::cluster_sync();
    const int own = tile / walk.ctas;
    for (int i = static_cast<int>(threadIdx.x) - 128; i < own * (wide / 2); i += 256) {
        const int row = walk.rank * own + i / (wide / 2), column = i % (wide / 2) * 2;
        float2 all{0.0f, 0.0f};
        for (int rank = 0; rank < walk.ctas; ++rank) {
            const float2 part = ptx::read_remote(ptx::in_cta(at.sum(row, column), static_cast<unsigned>(rank)));
            all.x += part.x, all.y += part.y;
        }
        if (walk.tile_first + row < z.s.seq_k)
            *reinterpret_cast<__nv_bfloat162*>(in.dk + z.row_of(walk.tile_first + row, walk.sequence) * wide + column) =
                __floats2bfloat162_rn(all.x, all.y);
    }
    ptx::cluster_sync();
}

__global__ void __launch_bounds__(threads, 1) key_grad_kernel(Operands in) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ unsigned char memory[];
    const KeyLayout at(memory);
    const KeyPlaces z{in.s.keys};
    Walk walk;
    walk.rank = static_cast<int>(ptx::cluster_rank()), walk.ctas = static_cast<int>(ptx::cluster_ctas());
    const std::int64_t number = blockIdx.x / walk.ctas; // Tiles that come first are in the most lists.
    walk.sequence = number % z.s.batch, walk.tile_first = number / z.s.batch * tile;
    walk.batches = static_cast<int>(ceil_div<std::int64_t>(z.s.seq_q, std::int64_t{batch_rows} * walk.ctas));
    walk.chunks = ceil_div(in.s.heads, stream_rows);
    const int warpgroup = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x / 128), 0);
    at.begin();
    if (warpgroup == 0) {
        ptx::give_registers<56>();
        produce_rows(in, at, z, walk);
        __syncwarp();
        ptx::cluster_sync();
        ptx::cluster_sync();
    } else {
        ptx::take_registers<224>();
        if (warpgroup == 1)
            consume_rows<false>(in, at, z, walk);
        else
            consume_rows<true>(in, at, z, walk);
    }
#endif
}

// A warp has a head of a row.
__global__ void __launch_bounds__(256) along_kernel(Operands in, const __nv_bfloat16* o, std::int64_t heads) {
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
    const Operands in{s,
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

    const std::int64_t tiles = ceil_div<std::int64_t>(z.seq_k, tile) * z.batch;
    CUDA_CHECK(
        cudaFuncSetAttribute(key_grad_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, KeyLayout::shared_bytes));
    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    // Few tiles need more CTAs each to keep a card busy.
    cluster.val.clusterDim.x = tiles < 128 ? 8 : 4, cluster.val.clusterDim.y = 1, cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(blocks_for(tiles, 1) * cluster.val.clusterDim.x);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = KeyLayout::shared_bytes;
    config.stream = stream_of(stream);
    config.attrs = &cluster;
    config.numAttrs = 1;
    CUDA_CHECK(cudaLaunchKernelEx(&config, key_grad_kernel, in));

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
