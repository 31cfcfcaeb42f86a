// Dispatch and combine over peer memory: half of a block's warps send, the others take in what arrives.
#include "kernels/cuda/cuda_kernels.hpp"
#include "kernels/cuda/peer_rows.cuh"
#include "kernels/cuda/peers.cuh"

#include <algorithm>
#include <stdexcept>

namespace moe::cuda {
namespace {

constexpr int gather_threads = 256;
constexpr int most_experts = 2048; // whose routes fit beside the rows in shared memory

struct Tokens {
    PeerGroup group;
    std::int64_t tokens, tiles, capacity, row_bytes;
    int top_k, experts, per_tile; // as many tokens as a warp has lanes for, one for each copy

    __device__ std::int64_t first(std::int64_t tile) const { return tile * per_tile; }
    __device__ int count(std::int64_t tile) const {
        return static_cast<int>(tokens - first(tile) < per_tile ? tokens - first(tile) : per_tile);
    }
    __device__ bool fits(int place) const { return place >= 0 && place < capacity; }
    // Of the lane's copy: numbers[tokens, top_k].
    __device__ int lane_of(const std::int32_t* numbers, std::int64_t tile, int none) const {
        const int lane = static_cast<int>(threadIdx.x % warp_size);
        if (lane >= count(tile) * top_k) return none;
        return __ldcg(numbers + first(tile) * top_k + lane);
    }
    // Lanes of a token's copies.
    __device__ unsigned copies(int token) const { return ((1u << top_k) - 1) << token * top_k; }
    __device__ unsigned row() const { return static_cast<unsigned>(row_bytes); }
};

// Tiles of a warp that sends: every so many-th, so that all ranks' first tokens leave first. What fetch(tile) finds is
// asked for one tile ahead.
template <class Fetch, class Body>
__device__ void for_each_tile(std::int64_t tiles, Fetch fetch, Body body) {
    const int warps = static_cast<int>(blockDim.x) / warp_size / 2, warp = static_cast<int>(threadIdx.x) / warp_size;
    if (warp >= warps) return;
    const std::int64_t step = warps * std::int64_t{gridDim.x};
    std::int64_t tile = warp * std::int64_t{gridDim.x} + blockIdx.x;
    int found = tile < tiles ? fetch(tile) : 0;
    for (; tile < tiles; tile += step) {
        const int next = tile + step < tiles ? fetch(tile + step) : 0;
        body(tile, found);
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

// Raises the flags of a tile at one rank or at all others.
struct Raise {
    const PeerGroup& group;
    std::int64_t tiles;
    unsigned call;
    int ranks; // that a flag's number stands for; 1: all others

    __device__ void operator()(int number) const {
        const unsigned to = ranks == 1 ? others(group) : 1u << (group.rank + 1 + number % ranks) % group.ranks;
        raise(group, to, tiles, number / ranks, call);
    }
};

struct Dispatch {
    Tokens s;
    const char* x;
    const std::int32_t *all_counts, *row_of;
    const float* weight; // null: places are known
    char* rows;
    float* probs;
    std::int32_t* places;
};

// Where the copy of this lane goes, by its row in this rank's expert-major order.
struct Way {
    int to = -1, place = -1; // rank, row there; -1: nowhere
    unsigned ranks = 0;      // all that the token goes to
    bool first = false;      // of the token's copies that go to that rank
};
__device__ Way way_of(const Tokens& s, const Routes& routes, int row) {
    Way way;
    const int lane = static_cast<int>(threadIdx.x % warp_size), token = lane / s.top_k;
    if (row >= 0) {
        const int expert = routes.expert_of(row);
        way.place = routes.place_of(row, expert);
        if (s.fits(way.place)) way.to = expert / routes.local;
    }
    for (int r = 0; r < s.group.ranks; ++r) {
        const unsigned there = __ballot_sync(all_lanes, way.to == r) & s.copies(token);
        if (there == 0) continue;
        way.ranks |= 1u << r;
        if (way.to == r) way.first = __ffs(static_cast<int>(there)) - 1 == lane;
    }
    return way;
}

// Tokens to every rank that has one of their experts: to the place of the first copy there, here to all places.
template <class Spreader>
__device__ void send_tile(const Dispatch& d, const Routes& routes, Spreader& spreader, std::int64_t tile, int row) {
    const PeerGroup& g = d.s.group;
    const int lane = static_cast<int>(threadIdx.x % warp_size), count = d.s.count(tile);
    const Way way = way_of(d.s, routes, row);
    if (d.weight != nullptr && lane < count * d.s.top_k) {
        const std::int64_t copy = d.s.first(tile) * d.s.top_k + lane;
        for (int r = 0; r < g.ranks; ++r)
            at_rank(g, d.places, r)[g.rank * d.s.tokens * d.s.top_k + copy] =
                way.to == r ? way.place : -1 - __popc(way.ranks & ((1u << r) - 1));
        if (way.to >= 0) at_rank(g, d.probs, way.to)[way.place] = d.weight[copy];
    }
    char* target = nullptr;
    if (way.to >= 0 && (way.first || way.to == g.rank)) target = at_rank(g, d.rows, way.to) + way.place * d.s.row_bytes;
    const char* from = d.x + d.s.first(tile) * d.s.row_bytes;
    for (int t = 0; t < count; ++t)
        spreader.spread(from + t * d.s.row_bytes, d.s.copies(t) >> lane & 1u ? target : nullptr, d.s.row());
}

// Tokens that have arrived, from the place of their first copies to those of the others.
template <class Spreader>
__device__ void copy_tile(const Dispatch& d, Spreader& spreader, int from, std::int64_t tile) {
    const int lane = static_cast<int>(threadIdx.x % warp_size);
    const int place = d.s.lane_of(d.places + from * d.s.tokens * d.s.top_k, tile, -1);
    const unsigned here = __ballot_sync(all_lanes, d.s.fits(place));
    for (int t = 0; t < d.s.count(tile); ++t) {
        const unsigned copies = here & d.s.copies(t);
        if (__popc(copies) < 2) continue;
        const int arrived_at = __shfl_sync(all_lanes, place, __ffs(static_cast<int>(copies)) - 1);
        const bool other = (copies & (copies - 1)) >> lane & 1u;
        spreader.spread(d.rows + arrived_at * d.s.row_bytes, other ? d.rows + place * d.s.row_bytes : nullptr,
                        d.s.row());
    }
}

__global__ void __launch_bounds__(peer_threads, 1) dispatch_kernel(__grid_constant__ const Dispatch d) {
    extern __shared__ __align__(128) char shared[];
    RowMemory& memory = *reinterpret_cast<RowMemory*>(shared);
    const PeerGroup& g = d.s.group;
    const unsigned call = begin_call(g);
    Spreader spreader(memory, Raise{g, d.s.tiles, call, 1});
    const Routes routes(g, d.s.experts, d.all_counts, reinterpret_cast<int*>(shared + sizeof(RowMemory)));
    wait_for_ranks(g, call);
    for_each_tile(
        d.s.tiles, [&](std::int64_t tile) { return d.s.lane_of(d.row_of, tile, -1); },
        [&](std::int64_t tile, int row) {
            send_tile(d, routes, spreader, tile, row);
            spreader.promise(static_cast<int>(tile));
        });
    spreader.finish();
    const int sources = g.ranks - 1;
    for_each_taken(g, d.s.tiles * sources, [&](std::int64_t number) {
        const std::int64_t tile = number / sources;
        const int from = static_cast<int>(g.rank + 1 + number % sources) % g.ranks;
        await(g, 1u << from, d.s.tiles, tile, call);
        ptx::fence_global_proxy();
        copy_tile(d, spreader, from, tile);
    });
    spreader.finish();
    end_call(g, call);
}

struct Combine {
    Tokens s;
    const char* rows;
    const std::int32_t *all_counts, *row_of, *places;
    const float* values; // null: none
    char *y, *parts;
    float* by_copy;
    int parts_per_token;
};

// The copies that are here of another rank's tokens, as one row of each to that rank; their values one by one.
template <class Summer>
__device__ void send_sums(const Combine& c, Summer& summer, int to, std::int64_t tile, int place) {
    const PeerGroup& g = c.s.group;
    const int lane = static_cast<int>(threadIdx.x % warp_size), count = c.s.count(tile);
    const bool copy = lane < count * c.s.top_k, here = copy && c.s.fits(place);
    if (here && c.values != nullptr) at_rank(g, c.by_copy, to)[c.s.first(tile) * c.s.top_k + lane] = c.values[place];
    Sums& sums = summer.sums();
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
    summer.sum(count, c.s.row());
}

// Tokens of this rank: the copies that are here, then the other ranks' sums in their order.
template <class Summer>
__device__ void sum_tile(const Combine& c, const Routes& routes, Summer& summer, std::int64_t tile, int row) {
    const PeerGroup& g = c.s.group;
    const int lane = static_cast<int>(threadIdx.x % warp_size), count = c.s.count(tile);
    const Way way = way_of(c.s, routes, row);
    const bool here = way.to == g.rank;
    if (c.values != nullptr && lane < count * c.s.top_k && (here || way.to < 0))
        c.by_copy[c.s.first(tile) * c.s.top_k + lane] = here ? c.values[way.place] : 0.0f;
    Sums& sums = summer.sums();
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
    summer.sum(count, c.s.row());
}

template <class A>
__global__ void __launch_bounds__(peer_threads, 1) combine_kernel(__grid_constant__ const Combine c) {
    extern __shared__ __align__(128) char shared[];
    RowMemory& memory = *reinterpret_cast<RowMemory*>(shared);
    const PeerGroup& g = c.s.group;
    const unsigned call = begin_call(g);
    const int sources = g.ranks - 1;
    Summer<A, Raise> summer(memory, Raise{g, c.s.tiles, call, sources});
    const Routes routes(g, c.s.experts, c.all_counts, reinterpret_cast<int*>(shared + sizeof(RowMemory)));
    wait_for_ranks(g, call);
    const auto rank_of = [&](std::int64_t number) { return static_cast<int>(g.rank + 1 + number % sources) % g.ranks; };
    for_each_tile(
        c.s.tiles * sources,
        [&](std::int64_t number) {
            return c.s.lane_of(c.places + rank_of(number) * c.s.tokens * c.s.top_k, number / sources, -1);
        },
        [&](std::int64_t number, int place) {
            send_sums(c, summer, rank_of(number), number / sources, place);
            summer.promise(static_cast<int>(number));
        });
    summer.finish();
    for_each_taken(g, c.s.tiles, [&](std::int64_t tile) {
        const int row = c.s.lane_of(c.row_of, tile, -1);
        await(g, others(g), c.s.tiles, tile, call);
        ptx::fence_global_proxy();
        sum_tile(c, routes, summer, tile, row);
    });
    summer.finish();
    end_call(g, call);
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
    end_call(g, call);
}

void check_sizes(const PeerGroup& g, const TokenShape& s, Type type) {
    const std::int64_t bytes = s.cols * static_cast<std::int64_t>(size_of(type));
    if (g.ranks > most_peers || s.top_k > most_choices || s.experts > most_experts || s.experts % g.ranks != 0 ||
        bytes % 16 != 0 || g.ranks * s.tokens * s.top_k > 0x7fffffff)
        throw std::runtime_error("cuda: dispatch over peer memory of " + std::to_string(s.tokens) + " tokens, top_k " +
                                 std::to_string(s.top_k) + ", " + std::to_string(s.experts) + " experts and rows of " +
                                 std::to_string(bytes) + " bytes on " + std::to_string(g.ranks) +
                                 " ranks: use dispatcher alltoall");
}

// Tokens of a tile, for whose copies a warp has lanes; fewer where warps would otherwise have few tiles each.
int tokens_per_tile(const PeerGroup& g, const TokenShape& s) {
    constexpr std::int64_t tiles_per_warp = 4;
    const std::int64_t warps = std::int64_t{g.blocks} * peer_warps / 2;
    const int most = std::min(Sums::most_tokens, warp_size / s.top_k);
    return static_cast<int>(std::clamp<std::int64_t>(s.tokens / (tiles_per_warp * warps), 1, most));
}

Tokens tokens_of(const PeerGroup& g, const TokenShape& s, Type type) {
    check_sizes(g, s, type);
    const int per_tile = tokens_per_tile(g, s);
    return {g,
            s.tokens,
            ceil_div<std::int64_t>(s.tokens, per_tile),
            s.capacity,
            s.cols * static_cast<std::int64_t>(size_of(type)),
            s.top_k,
            s.experts,
            per_tile};
}

template <auto kernel, class Arguments>
void launch(const PeerGroup& g, const Arguments& arguments, void* stream) {
    const std::size_t shared = sizeof(RowMemory) + Routes::bytes(arguments.s.experts);
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
    const std::int64_t tiles = arguments.s.tiles > 0 ? arguments.s.tiles : 1;
    const int most = std::min(g.blocks, multiprocessors());
    kernel<<<blocks_for(tiles, peer_warps / 2, most), peer_threads, shared, stream_of(stream)>>>(arguments);
    CUDA_CHECK(cudaGetLastError());
}

void dispatch(const PeerGroup& g, const TokenShape& s, Src x, const std::int32_t* all_counts,
              const std::int32_t* row_of, const float* weight, Dst rows, float* probs, std::int32_t* places,
              void* stream) {
    const Dispatch d{tokens_of(g, s, x.type),
                     static_cast<const char*>(x.data),
                     all_counts,
                     row_of,
                     weight,
                     static_cast<char*>(rows.data),
                     probs,
                     places};
    launch<dispatch_kernel>(g, d, stream);
}

void combine(const PeerGroup& g, const TokenShape& s, Src rows, const std::int32_t* all_counts,
             const std::int32_t* row_of, const std::int32_t* places, const float* values, Dst y, Dst parts,
             float* by_copy, void* stream) {
    const Combine c{tokens_of(g, s, rows.type),
                    static_cast<const char*>(rows.data),
                    all_counts,
                    row_of,
                    places,
                    values,
                    static_cast<char*>(y.data),
                    static_cast<char*>(parts.data),
                    by_copy,
                    s.top_k < g.ranks ? s.top_k : g.ranks};
    if (rows.type == Type::f32)
        launch<combine_kernel<Access<float, 4>>>(g, c, stream);
    else
        launch<combine_kernel<Access<__nv_bfloat16, 8>>>(g, c, stream);
}

void gather(const PeerGroup& g, const void* x, void* y, std::int64_t bytes, void* stream) {
    if (bytes % 4 != 0) throw std::runtime_error("cuda: a gather of " + std::to_string(bytes) + " bytes");
    gather_kernel<<<1, gather_threads, 0, stream_of(stream)>>>(g, static_cast<const unsigned*>(x),
                                                               static_cast<unsigned*>(y), bytes / 4);
    CUDA_CHECK(cudaGetLastError());
}

std::int64_t board_bytes(int ranks, std::int64_t tokens) {
    const std::int64_t flags = ranks * (tokens > 0 ? tokens : 1); // tiles have a token at least
    return static_cast<std::int64_t>(sizeof(Board) + sizeof(unsigned) * static_cast<std::size_t>(flags));
}

} // namespace
} // namespace moe::cuda

namespace moe {

const PeerKernels& cuda_peer_kernels() {
    static const PeerKernels table{cuda::board_bytes, cuda::dispatch, cuda::combine, cuda::gather};
    return table;
}

} // namespace moe
