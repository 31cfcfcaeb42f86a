// Gradients of the keys of attention over picked keys, on Hopper's tensor cores: a cluster takes the keys at 64
// positions.
//
// A tile goes over all its rows in order, so that its gradient has the same bits every time: the CTAs of a cluster take
// the rows in turn and add their sums in the order of their ranks.
//
// Floor: 4 (qk_dim + v_dim) FLOPs for every head of a row and all 64 keys of a tile of which the row has one.
#include "kernels/cuda/sparse/sparse_tensor_grad.cuh"

namespace moe::cuda::sparse_tensor {
namespace {

// The rows of a CTA that are one batch, and the tile of keys.
struct Walk {
    std::int64_t tile_first, sequence;
    int rank, ctas, batches, chunks;
};

// The producers' threads have a row each. Those that have keys of the tile are counted; their masks and queries are
// then in order in shared memory.
template <class L>
__device__ void find_rows(const GradOperands& in, const L& at, const KeyPlaces& z, const Walk& walk, int batch) {
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
__device__ void produce_rows(const GradOperands& in, const L& at, const KeyPlaces& z, const Walk& walk) {
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
__device__ void consume_rows(const GradOperands& in, const L& at, const KeyPlaces& z, const Walk& walk) {
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

__global__ void __launch_bounds__(threads, 1) key_grad_kernel(GradOperands in) {
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

} // namespace

void add_up_keys(const GradOperands& in, cudaStream_t stream) {
    const PickedKeys& z = in.s.keys;
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
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    CUDA_CHECK(cudaLaunchKernelEx(&config, key_grad_kernel, in));
}

} // namespace moe::cuda::sparse_tensor
