// Dispatch and combine over peer memory: rows are fetched from the rank of their token, sums are sent back to it.
#include "kernels/cuda/cuda_kernels.hpp"
#include "kernels/cuda/tokens/peer_rows.cuh"
#include "kernels/cuda/tokens/peer_sums.cuh"
#include "kernels/cuda/tokens/peers.cuh"

#include <algorithm>
#include <stdexcept>

namespace moe::cuda {
namespace {

constexpr int gather_threads = 256;
constexpr int most_experts = 896; // most experts whose routes fit beside the rows in shared memory

struct Tokens {
    PeerGroup group;
    std::int64_t tokens, tiles, capacity, row_bytes;
    int top_k, experts, per_tile; // per_tile: as many tokens as a warp has lanes for, one for each copy

    __device__ std::int64_t first(std::int64_t tile) const { return tile * per_tile; }
    __device__ int count(std::int64_t tile) const {
        return static_cast<int>(tokens - first(tile) < per_tile ? tokens - first(tile) : per_tile);
    }
    __device__ bool fits(int place) const { return place >= 0 && place < capacity; }
    // The number of the lane's copy, of numbers[tokens, top_k].
    __device__ int lane_of(const std::int32_t* numbers, std::int64_t tile, int none) const {
        const int lane = static_cast<int>(threadIdx.x % warp_size);
        if (lane >= count(tile) * top_k) return none;
        return __ldcg(numbers + first(tile) * top_k + lane);
    }
    // Lanes of a token's copies.
    __device__ unsigned copies(int token) const { return ((1u << top_k) - 1) << token * top_k; }
    __device__ unsigned row() const { return static_cast<unsigned>(row_bytes); }
};

// Numbers below `count`, by turns to the first `warps` of every block, of which this is number `warp`. The result of
// fetch(number) is asked for one number ahead.
template <class Fetch, class Body>
__device__ void for_each(int warp, int warps, std::int64_t count, Fetch fetch, Body body) {
    if (warp >= warps) return;
    const std::int64_t step = warps * std::int64_t{gridDim.x};
    std::int64_t number = warp * std::int64_t{gridDim.x} + blockIdx.x;
    int found = number < count ? fetch(number) : 0;
    for (; number < count; number += step) {
        const int next = number + step < count ? fetch(number + step) : 0;
        body(number, found);
        found = next;
    }
}

// Numbers below `count`, each to one warp of the grid that asks for it, which it does one number ahead.
template <class Body>
__device__ void for_each_taken(const PeerGroup& g, std::int64_t count, Body body) {
    Board* mine = board_of(g, g.rank);
    const bool asks = threadIdx.x % warp_size == 0;
    unsigned next = asks ? atomicAdd(&mine->next, 1u) : 0u;
    while (true) {
        const unsigned number = __shfl_sync(all_lanes, next, 0);
        if (number >= count) return;
        if (asks) next = atomicAdd(&mine->next, 1u);
        body(static_cast<std::int64_t>(number));
    }
}

// The way of this lane's copy, by its row in the expert-major order of the token's rank.
struct Way {
    int to = -1, place = -1; // rank, and row there; -1 = nowhere
    unsigned ranks = 0;      // bits of all ranks that the token goes to
};
__device__ Way way_of(const Tokens& s, const Routes& routes, int rank, int row) {
    Way way;
    const int token = static_cast<int>(threadIdx.x % warp_size) / s.top_k;
    if (row >= 0) {
        const int expert = routes.expert_of(rank, row);
        way.place = routes.place_of(rank, row, expert);
        if (s.fits(way.place)) way.to = expert / routes.local;
    }
    for (int r = 0; r < s.group.ranks; ++r)
        if ((__ballot_sync(all_lanes, way.to == r) & s.copies(token)) != 0) way.ranks |= 1u << r;
    return way;
}

struct Dispatch {
    Tokens s;
    const char *x, *x_scale; // x_scale: scales of rows in E4M3
    const std::int32_t *all_counts, *row_of;
    const float* weight; // null: places are known
    char *rows, *row_scale;
    float* probs;
    std::int32_t* places;
};

// Tokens of a rank that have experts here: each row comes once, and goes to the places of all its copies.
template <bool scaled>
__device__ void take_tile(const Dispatch& d, const Routes& routes, Spreader<scaled>& spreader, int rank,
                          std::int64_t tile, int row) {
    const PeerGroup& g = d.s.group;
    const int lane = static_cast<int>(threadIdx.x % warp_size), count = d.s.count(tile);
    const std::int64_t copy = d.s.first(tile) * d.s.top_k + lane;
    const bool known = d.weight == nullptr;
    const Way way = way_of(d.s, routes, rank, row);
    const bool here = way.to == g.rank;
    const float weight = here && !known ? __ldcg(at_rank(g, d.weight, rank) + copy) : 0.0f;
    char* const target = here ? d.rows + way.place * d.s.row_bytes : nullptr;
    for (int t = 0; t < count; ++t) {
        const std::int64_t at = (d.s.first(tile) + t) * d.s.row_bytes;
        spreader.spread(at_rank(g, d.x, rank) + at, scaled ? at_rank(g, d.x_scale, rank) + at / scale_share : nullptr,
                        d.s.copies(t) >> lane & 1u ? target : nullptr, d.s.row());
    }
    if (known || lane >= count * d.s.top_k) return;
    d.places[rank * d.s.tokens * d.s.top_k + copy] = here ? way.place : -1 - __popc(way.ranks & ((1u << g.rank) - 1));
    if (here) d.probs[way.place] = weight;
}

template <bool scaled>
__global__ void __launch_bounds__(spread_threads, 1) dispatch_kernel(__grid_constant__ const Dispatch d) {
    extern __shared__ __align__(128) char shared[];
    const PeerGroup& g = d.s.group;
    const unsigned call = begin_call(g);
    using Memory = SpreadMemory<scaled>;
    Spreader<scaled> spreader(*reinterpret_cast<Memory*>(shared), d.rows, d.row_scale);
    const Routes routes(g, d.s.experts, d.all_counts, reinterpret_cast<int*>(shared + sizeof(Memory)), 0, g.ranks);
    wait_for_ranks(g, call);
    ptx::fence_global_proxy();
    const auto rank_of = [&](std::int64_t number) { return static_cast<int>(g.rank + number % g.ranks) % g.ranks; };
    for_each(
        static_cast<int>(threadIdx.x) / warp_size, spread_warps, d.s.tiles * g.ranks,
        [&](std::int64_t number) { return d.s.lane_of(at_rank(g, d.row_of, rank_of(number)), number / g.ranks, -1); },
        [&](std::int64_t number, int row) { take_tile(d, routes, spreader, rank_of(number), number / g.ranks, row); });
    spreader.finish();
    end_call(g, call, true);
}

// Raises the flag of a tile for one of the `ranks` other ranks, by the number of both.
struct Raise {
    const PeerGroup& group;
    std::int64_t tiles;
    unsigned call;
    int ranks;

    __device__ void operator()(int number) const {
        raise(group, 1u << (group.rank + 1 + number % ranks) % group.ranks, tiles, number / ranks, call);
    }
};

struct Combine {
    Tokens s;
    const char* rows;
    const std::int32_t *all_counts, *row_of, *places;
    const float* values; // null: there are none
    char *y, *parts;
    float* by_copy;
    int parts_per_token;
};

// The copies that are here of another rank's tokens, as one row of each to that rank; their values one by one. `flag`
// rises there.
__device__ void send_sums(const Combine& c, Bringer& bringer, int to, std::int64_t tile, int place, int flag) {
    const PeerGroup& g = c.s.group;
    const int lane = static_cast<int>(threadIdx.x % warp_size), count = c.s.count(tile);
    const bool copy = lane < count * c.s.top_k, here = copy && c.s.fits(place);
    if (here && c.values != nullptr) at_rank(g, c.by_copy, to)[c.s.first(tile) * c.s.top_k + lane] = c.values[place];
    Sums& sums = bringer.sums();
    const unsigned all = __ballot_sync(all_lanes, here), elsewhere = __ballot_sync(all_lanes, copy && place < 0);
    if (here) sums.from[__popc(all & ((1u << lane) - 1))] = c.rows + place * c.s.row_bytes;
    for (int t = 0; t < count; ++t) {
        const unsigned copies = c.s.copies(t), away = elsewhere & copies;
        // Copies elsewhere say how many ranks come before; without one, none does.
        const int said = __shfl_sync(all_lanes, place, away != 0 ? __ffs(static_cast<int>(away)) - 1 : 0);
        const std::int64_t part = (c.s.first(tile) + t) * c.parts_per_token + (away != 0 ? -1 - said : 0);
        if (lane != 0) continue;
        sums.to[t] = (all & copies) != 0 ? at_rank(g, c.parts, to) + part * c.s.row_bytes : nullptr;
        sums.end[t] = __popc(all & (copies | (copies - 1)));
    }
    bringer.bring(count, flag, c.s.row());
}

// Tokens of this rank: the copies that are here, then the other ranks' sums in their order.
__device__ void sum_tile(const Combine& c, const Routes& routes, Bringer& bringer, std::int64_t tile, int row) {
    const PeerGroup& g = c.s.group;
    const int lane = static_cast<int>(threadIdx.x % warp_size), count = c.s.count(tile);
    const Way way = way_of(c.s, routes, c.s.group.rank, row);
    const bool here = way.to == g.rank;
    if (c.values != nullptr && lane < count * c.s.top_k && (here || way.to < 0))
        c.by_copy[c.s.first(tile) * c.s.top_k + lane] = here ? c.values[way.place] : 0.0f;
    Sums& sums = bringer.sums();
    const unsigned all = __ballot_sync(all_lanes, here), before = (1u << lane) - 1;
    int end = 0;
    for (int t = 0; t < count; ++t) {
        const std::int64_t token = c.s.first(tile) + t;
        const unsigned copies = c.s.copies(t), ranks = __shfl_sync(all_lanes, way.ranks, t * c.s.top_k);
        const unsigned elsewhere = ranks & others(g);
        if (here && (copies >> lane & 1u))
            sums.from[end + __popc(all & copies & before)] = c.rows + way.place * c.s.row_bytes;
        end += __popc(all & copies);
        if (elsewhere >> lane & 1u)
            sums.from[end + __popc(elsewhere & before)] =
                c.parts + (token * c.parts_per_token + __popc(ranks & before)) * c.s.row_bytes;
        end += __popc(elsewhere);
        if (lane != 0) continue;
        sums.to[t] = c.y + token * c.s.row_bytes;
        sums.end[t] = end;
    }
    bringer.bring(count, -1, c.s.row());
}

// Some pairs send first, then all take tokens of this rank.
__device__ void bring_tiles(const Combine& c, const Routes& routes, Bringer bringer, int pair, unsigned call) {
    const PeerGroup& g = c.s.group;
    const int sources = g.ranks - 1;
    const auto rank_of = [&](std::int64_t number) { return static_cast<int>(g.rank + 1 + number % sources) % g.ranks; };
    for_each(
        pair, sending_pairs, c.s.tiles * sources,
        [&](std::int64_t number) {
            return c.s.lane_of(c.places + rank_of(number) * c.s.tokens * c.s.top_k, number / sources, -1);
        },
        [&](std::int64_t number, int place) {
            send_sums(c, bringer, rank_of(number), number / sources, place, static_cast<int>(number));
        });
    bringer.bring(Sums::settle, -1, 0);
    for_each_taken(g, c.s.tiles, [&](std::int64_t tile) {
        const int row = c.s.lane_of(c.row_of, tile, -1);
        await(g, others(g), c.s.tiles, tile, call);
        ptx::fence_global_proxy();
        sum_tile(c, routes, bringer, tile, row);
    });
    bringer.bring(Sums::over, -1, 0);
}

template <class A>
__global__ void __launch_bounds__(sum_threads, 1) combine_kernel(__grid_constant__ const Combine c) {
    extern __shared__ __align__(128) char shared[];
    const PeerGroup& g = c.s.group;
    const unsigned call = begin_call(g);
    SumMemory& memory = *reinterpret_cast<SumMemory*>(shared);
    const int warp = static_cast<int>(threadIdx.x) / warp_size, pair = warp % sum_pairs;
    if (warp == pair) memory.initialise(pair);
    const Routes routes(g, c.s.experts, c.all_counts, reinterpret_cast<int*>(shared + sizeof(SumMemory)), g.rank, 1);
    wait_for_ranks(g, call);
    if (warp == pair)
        Summer<A, Raise>(memory, pair, Raise{g, c.s.tiles, call, g.ranks - 1}).sum(c.s.row());
    else
        bring_tiles(c, routes, Bringer(memory, pair), pair, call);
    end_call(g, call, false);
}

// One block: its flag is the first of a rank's.
__global__ void __launch_bounds__(gather_threads)
    gather_kernel(__grid_constant__ const PeerGroup g, const unsigned* x, unsigned* y, std::int64_t words) {
    const unsigned call = begin_call(g);
    wait_for_ranks(g, call);
    for (int r = 0; r < g.ranks; ++r) {
        unsigned* to = at_rank(g, y, r) + g.rank * words;
        for (std::int64_t i = threadIdx.x; i < words; i += gather_threads) to[i] = x[i];
    }
    __syncthreads();
    if (threadIdx.x < warp_size) {
        raise(g, others(g), 1, 0, call);
        await(g, others(g), 1, 0, call);
    }
    end_call(g, call, false);
}

void check_sizes(const PeerGroup& g, const TokenShape& s, std::int64_t row_bytes, std::int64_t scale_bytes) {
    if (g.ranks > most_peers || s.top_k > most_choices || s.experts > most_experts || s.experts % g.ranks != 0 ||
        row_bytes % 16 != 0 || scale_bytes % 16 != 0 || g.ranks * s.tokens * s.top_k > 0x7fffffff)
        throw std::runtime_error("cuda: dispatch over peer memory of " + std::to_string(s.tokens) + " tokens, top_k " +
                                 std::to_string(s.top_k) + ", " + std::to_string(s.experts) + " experts and rows of " +
                                 std::to_string(row_bytes) + " bytes on " + std::to_string(g.ranks) +
                                 " ranks: use dispatcher alltoall");
}

// Tokens of a tile, for whose copies a warp has lanes; fewer where the `sending` warps of a block would otherwise have
// few tiles each.
int tokens_per_tile(const PeerGroup& g, const TokenShape& s, int sending) {
    constexpr std::int64_t tiles_per_warp = 4;
    const std::int64_t warps = std::int64_t{g.blocks} * sending;
    const int most = std::min(Sums::most_tokens, warp_size / s.top_k);
    return static_cast<int>(std::clamp<std::int64_t>(s.tokens / (tiles_per_warp * warps), 1, most));
}

// scale_bytes: bytes of a row's scales, 0 = it has none.
Tokens tokens_of(const PeerGroup& g, const TokenShape& s, int sending, std::int64_t row_bytes,
                 std::int64_t scale_bytes = 0) {
    check_sizes(g, s, row_bytes, scale_bytes);
    const int per_tile = tokens_per_tile(g, s, sending);
    return {g,         s.tokens, ceil_div<std::int64_t>(s.tokens, per_tile), s.capacity, row_bytes, s.top_k,
            s.experts, per_tile};
}
std::int64_t row_bytes(const TokenShape& s, Type type) { return s.cols * static_cast<std::int64_t>(size_of(type)); }

template <auto kernel, class Arguments>
void launch(const PeerGroup& g, const Arguments& arguments, int threads, std::size_t shared, void* stream) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
    const std::int64_t tiles = arguments.s.tiles > 0 ? arguments.s.tiles : 1;
    const int most = std::min(g.blocks, multiprocessors());
    const int each = threads / warp_size / 2; // tiles of a block at least
    kernel<<<blocks_for(tiles, each, most), threads, shared, stream_of(stream)>>>(arguments);
    CUDA_CHECK(cudaGetLastError());
}

template <bool scaled>
void launch_dispatch(const Dispatch& d, void* stream) {
    launch<dispatch_kernel<scaled>>(d.s.group, d, spread_threads,
                                    sizeof(SpreadMemory<scaled>) + Routes::bytes(d.s.experts, d.s.group.ranks), stream);
}

void dispatch(const PeerGroup& g, const TokenShape& s, Src x, const std::int32_t* all_counts,
              const std::int32_t* row_of, const float* weight, Dst rows, float* probs, std::int32_t* places,
              void* stream) {
    const Dispatch d{tokens_of(g, s, spread_warps / 2, row_bytes(s, x.type)),
                     static_cast<const char*>(x.data),
                     nullptr,
                     all_counts,
                     row_of,
                     weight,
                     static_cast<char*>(rows.data),
                     nullptr,
                     probs,
                     places};
    launch_dispatch<false>(d, stream);
}

void dispatch_quantized(const PeerGroup& g, const TokenShape& s, const std::uint8_t* x, const float* x_scale,
                        const std::int32_t* all_counts, const std::int32_t* row_of, const float* weight,
                        std::uint8_t* rows, float* row_scale, float* probs, std::int32_t* places, void* stream) {
    const Dispatch d{tokens_of(g, s, spread_warps / 2, s.cols, s.cols / scale_share),
                     reinterpret_cast<const char*>(x),
                     reinterpret_cast<const char*>(x_scale),
                     all_counts,
                     row_of,
                     weight,
                     reinterpret_cast<char*>(rows),
                     reinterpret_cast<char*>(row_scale),
                     probs,
                     places};
    launch_dispatch<true>(d, stream);
}

void combine(const PeerGroup& g, const TokenShape& s, Src rows, const std::int32_t* all_counts,
             const std::int32_t* row_of, const std::int32_t* places, const float* values, Dst y, Dst parts,
             float* by_copy, void* stream) {
    const Combine c{tokens_of(g, s, sending_pairs, row_bytes(s, rows.type)),
                    static_cast<const char*>(rows.data),
                    all_counts,
                    row_of,
                    places,
                    values,
                    static_cast<char*>(y.data),
                    static_cast<char*>(parts.data),
                    by_copy,
                    s.top_k < g.ranks ? s.top_k : g.ranks};
    const std::size_t shared = sizeof(SumMemory) + Routes::bytes(s.experts, 1);
    if (rows.type == Type::f32)
        launch<combine_kernel<Access<float, 4>>>(g, c, sum_threads, shared, stream);
    else
        launch<combine_kernel<Access<__nv_bfloat16, 8>>>(g, c, sum_threads, shared, stream);
}

void gather(const PeerGroup& g, const void* x, void* y, std::int64_t bytes, void* stream) {
    if (bytes % 4 != 0) throw std::runtime_error("cuda: a gather of " + std::to_string(bytes) + " bytes");
    gather_kernel<<<1, gather_threads, 0, stream_of(stream)>>>(g, static_cast<const unsigned*>(x),
                                                               static_cast<unsigned*>(y), bytes / 4);
    CUDA_CHECK(cudaGetLastError());
}

std::int64_t board_bytes(int ranks, std::int64_t tokens) {
    const std::int64_t flags = ranks * (tokens > 0 ? tokens : 1); // Tiles have a token at least.
    return static_cast<std::int64_t>(sizeof(Board) + sizeof(unsigned) * static_cast<std::size_t>(flags));
}

} // namespace
} // namespace moe::cuda

namespace moe {

const PeerKernels& cuda_peer_kernels() {
    static const PeerKernels table{cuda::board_bytes, cuda::dispatch, cuda::dispatch_quantized, cuda::combine,
                                   cuda::gather};
    return table;
}

} // namespace moe
