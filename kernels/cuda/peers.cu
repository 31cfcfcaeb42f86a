// Dispatch and combine over peer memory: half of a block's warps send, the others take in what arrives.
#include "kernels/cuda/cuda_kernels.hpp"
#include "kernels/cuda/peers.cuh"
#include "kernels/cuda/vector.cuh"

#include <stdexcept>

namespace moe::cuda {
namespace {

constexpr int dispatch_threads = 1024, combine_threads = 768, gather_threads = 256;
constexpr int most_experts = 4096; // whose routes fit the shared memory that needs no asking

struct Tokens {
    PeerGroup group;
    std::int64_t tokens, tiles, capacity, row_bytes;
    int top_k, experts;

    __device__ std::int64_t end(std::int64_t tile) const {
        const std::int64_t last = (tile + 1) * tokens_per_tile;
        return last < tokens ? last : tokens;
    }
    __device__ int places_of(const std::int32_t* places, int rank, std::int64_t token, int lane, int none) const {
        return lane < top_k ? __ldcg(places + (rank * tokens + token) * top_k + lane) : none;
    }
    __device__ bool fits(int place) const { return place >= 0 && place < capacity; }
};

// Tiles of a warp that sends: every so many-th, so that all ranks' first tokens leave first.
template <class Body>
__device__ void for_each_tile(std::int64_t tiles, Body body) {
    const int warps = static_cast<int>(blockDim.x) / warp_size / 2, warp = static_cast<int>(threadIdx.x) / warp_size;
    if (warp >= warps) return;
    for (std::int64_t tile = warp * std::int64_t{gridDim.x} + blockIdx.x; tile < tiles; tile += warps * gridDim.x)
        body(tile);
}

// Numbers below `count`, each to one warp of the grid that asks for it.
template <class Body>
__device__ void for_each_taken(const PeerGroup& g, std::int64_t count, Body body) {
    Board* mine = board_of(g, g.rank);
    while (true) {
        unsigned number = 0;
        if (threadIdx.x % warp_size == 0) number = atomicAdd(&mine->next, 1u);
        number = __shfl_sync(all_lanes, number, 0);
        if (number >= count) return;
        body(static_cast<std::int64_t>(number));
    }
}

// A row from one place to those that lanes name, null: none. Read once, by a warp.
__device__ void spread_row(const char* from, char* target, std::int64_t bytes) {
    constexpr int together = 8;
    const unsigned targets = __ballot_sync(all_lanes, target != nullptr);
    const int lane = static_cast<int>(threadIdx.x % warp_size), words = static_cast<int>(bytes / 16);
    for (int base = 0; base < words; base += warp_size * together) {
        uint4 held[together];
#pragma unroll
        for (int t = 0; t < together; ++t) {
            const int word = base + t * warp_size + lane;
            if (word < words) held[t] = __ldcg(reinterpret_cast<const uint4*>(from) + word);
        }
        for (unsigned left = targets; left != 0; left &= left - 1) {
            char* to = reinterpret_cast<char*>(__shfl_sync(all_lanes, reinterpret_cast<unsigned long long>(target),
                                                           __ffs(static_cast<int>(left)) - 1));
#pragma unroll
            for (int t = 0; t < together; ++t) {
                const int word = base + t * warp_size + lane;
                if (word < words) reinterpret_cast<uint4*>(to)[word] = held[t];
            }
        }
    }
}

struct Dispatch {
    Tokens s;
    const char* x;
    const std::int32_t *all_counts, *row_of;
    const float* weight; // null: places are known
    char* rows;
    float* probs;
    std::int32_t* places;
};

// Where the copy of this lane goes.
struct Way {
    int to = -1, place = -1; // rank, row there; -1: nowhere
    unsigned ranks = 0;      // all that the token goes to
};
__device__ Way way_of(const Tokens& s, const Routes& routes, const std::int32_t* row_of, std::int64_t token, int lane) {
    Way way;
    const int row = lane < s.top_k ? row_of[token * s.top_k + lane] : -1;
    if (row >= 0) {
        const int expert = routes.expert_of(row);
        way.place = routes.place_of(row, expert);
        if (s.fits(way.place)) way.to = expert / routes.local;
    }
    way.ranks = __reduce_or_sync(all_lanes, way.to >= 0 ? 1u << way.to : 0u);
    return way;
}

// A token to every rank that has one of its experts: to the place of its first copy there, here to all places.
__device__ void send_token(const Dispatch& d, const Routes& routes, std::int64_t token) {
    const PeerGroup& g = d.s.group;
    const int lane = static_cast<int>(threadIdx.x % warp_size);
    const auto [to, place, ranks] = way_of(d.s, routes, d.row_of, token, lane);
    const bool first = __ffs(static_cast<int>(__match_any_sync(all_lanes, to))) - 1 == lane;
    if (d.weight != nullptr && lane < d.s.top_k) {
        for (int r = 0; r < g.ranks; ++r)
            at_rank(g, d.places, r)[(g.rank * d.s.tokens + token) * d.s.top_k + lane] =
                to == r ? place : -1 - __popc(ranks & ((1u << r) - 1));
        if (to >= 0) at_rank(g, d.probs, to)[place] = d.weight[token * d.s.top_k + lane];
    }
    char* target = nullptr;
    if (to >= 0 && (first || to == g.rank)) target = at_rank(g, d.rows, to) + place * d.s.row_bytes;
    spread_row(d.x + token * d.s.row_bytes, target, d.s.row_bytes);
}

// A token that has arrived, from the place of its first copy to those of the others.
__device__ void copy_token(const Dispatch& d, int from, std::int64_t token) {
    const int lane = static_cast<int>(threadIdx.x % warp_size);
    const int place = d.s.places_of(d.places, from, token, lane, -1);
    const bool here = d.s.fits(place);
    const unsigned copies = __ballot_sync(all_lanes, here);
    if (__popc(copies) < 2) return;
    const int first = __ffs(static_cast<int>(copies)) - 1;
    const int arrived_at = __shfl_sync(all_lanes, place, first);
    spread_row(d.rows + arrived_at * d.s.row_bytes, here && lane != first ? d.rows + place * d.s.row_bytes : nullptr,
               d.s.row_bytes);
}

__global__ void __launch_bounds__(dispatch_threads, 1) dispatch_kernel(__grid_constant__ const Dispatch d) {
    extern __shared__ int numbers[];
    const PeerGroup& g = d.s.group;
    const unsigned call = begin_call(g);
    const Routes routes(g, d.s.experts, d.all_counts, numbers);
    wait_for_ranks(g, call);
    for_each_tile(d.s.tiles, [&](std::int64_t tile) {
        for (std::int64_t t = tile * tokens_per_tile; t < d.s.end(tile); ++t) send_token(d, routes, t);
        raise(g, others(g), d.s.tiles, tile, call);
    });
    const int sources = g.ranks - 1;
    for_each_taken(g, d.s.tiles * sources, [&](std::int64_t number) {
        const std::int64_t tile = number / sources;
        const int from = static_cast<int>(g.rank + 1 + number % sources) % g.ranks;
        await(g, 1u << from, d.s.tiles, tile, call);
        for (std::int64_t t = tile * tokens_per_tile; t < d.s.end(tile); ++t) copy_token(d, from, t);
    });
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

// The sum, in FP32 and in the order of the lanes, of the rows that lanes name, null: none.
template <class A>
__device__ void sum_rows(const char* source, char* to, std::int64_t bytes) {
    constexpr int together = 2, wide = 4; // packs of a lane, rows
    const unsigned sources = __ballot_sync(all_lanes, source != nullptr);
    const int lane = static_cast<int>(threadIdx.x % warp_size), packs = static_cast<int>(bytes / 16);
    for (int base = 0; base < packs; base += warp_size * together) {
        float sum[together][A::width] = {};
        for (unsigned left = sources; left != 0;) {
            uint4 held[wide][together];
            bool there[wide];
#pragma unroll
            for (int w = 0; w < wide; ++w) {
                there[w] = left != 0;
                const char* from =
                    reinterpret_cast<const char*>(__shfl_sync(all_lanes, reinterpret_cast<unsigned long long>(source),
                                                              there[w] ? __ffs(static_cast<int>(left)) - 1 : 0));
                left &= left - 1;
#pragma unroll
                for (int t = 0; t < together; ++t) {
                    const int pack = base + t * warp_size + lane;
                    if (there[w] && pack < packs) held[w][t] = __ldcg(reinterpret_cast<const uint4*>(from) + pack);
                }
            }
#pragma unroll
            for (int w = 0; w < wide; ++w) {
                if (!there[w]) break;
#pragma unroll
                for (int t = 0; t < together; ++t) {
                    const typename A::Held pack{{held[w][t].x, held[w][t].y, held[w][t].z, held[w][t].w}};
#pragma unroll
                    for (int i = 0; i < A::width; ++i) sum[t][i] += pack[i];
                }
            }
        }
#pragma unroll
        for (int t = 0; t < together; ++t) {
            const int pack = base + t * warp_size + lane;
            if (pack < packs) A::put(Dst{to, Type::f32}, std::int64_t{pack} * A::width, sum[t]);
        }
    }
}

// The copies that are here of another rank's token, as one row to that rank; their values one by one.
template <class A>
__device__ void send_sum(const Combine& c, int to, std::int64_t token) {
    const PeerGroup& g = c.s.group;
    const int lane = static_cast<int>(threadIdx.x % warp_size);
    const int place = c.s.places_of(c.places, to, token, lane, -1);
    const bool here = c.s.fits(place);
    if (__ballot_sync(all_lanes, here) == 0) return;
    if (here && c.values != nullptr) at_rank(g, c.by_copy, to)[token * c.s.top_k + lane] = c.values[place];
    // Copies elsewhere say how many ranks come before; without one, none does.
    const unsigned elsewhere = __ballot_sync(all_lanes, place < 0 && lane < c.s.top_k);
    const int said = __shfl_sync(all_lanes, place, elsewhere != 0 ? __ffs(static_cast<int>(elsewhere)) - 1 : 0);
    const std::int64_t part = token * c.parts_per_token + (elsewhere != 0 ? -1 - said : 0);
    sum_rows<A>(here ? c.rows + place * c.s.row_bytes : nullptr, at_rank(g, c.parts, to) + part * c.s.row_bytes,
                c.s.row_bytes);
}

// A token of this rank: the copies that are here, then the other ranks' sums in their order. Lanes from 0 name copies,
// those from most_choices ranks.
template <class A>
__device__ void sum_token(const Combine& c, const Routes& routes, std::int64_t token) {
    const PeerGroup& g = c.s.group;
    const int lane = static_cast<int>(threadIdx.x % warp_size);
    const auto [at, place, ranks] = way_of(c.s, routes, c.row_of, token, lane);
    const bool here = at == g.rank;
    if (c.values != nullptr && lane < c.s.top_k && (here || at < 0))
        c.by_copy[token * c.s.top_k + lane] = here ? c.values[place] : 0.0f;
    const char* source = here ? c.rows + place * c.s.row_bytes : nullptr;
    const int other = lane - most_choices;
    if (other >= 0 && other != g.rank && (ranks >> other & 1u))
        source = c.parts + (token * c.parts_per_token + __popc(ranks & ((1u << other) - 1))) * c.s.row_bytes;
    sum_rows<A>(source, c.y + token * c.s.row_bytes, c.s.row_bytes);
}

template <class A>
__global__ void __launch_bounds__(combine_threads, 1) combine_kernel(__grid_constant__ const Combine c) {
    extern __shared__ int numbers[];
    const PeerGroup& g = c.s.group;
    const unsigned call = begin_call(g);
    const Routes routes(g, c.s.experts, c.all_counts, numbers);
    wait_for_ranks(g, call);
    const int sources = g.ranks - 1;
    for_each_tile(c.s.tiles * sources, [&](std::int64_t number) {
        const std::int64_t tile = number / sources;
        const int to = static_cast<int>(g.rank + 1 + number % sources) % g.ranks;
        for (std::int64_t t = tile * tokens_per_tile; t < c.s.end(tile); ++t) send_sum<A>(c, to, t);
        raise(g, 1u << to, c.s.tiles, tile, call);
    });
    for_each_taken(g, c.s.tiles, [&](std::int64_t tile) {
        await(g, others(g), c.s.tiles, tile, call);
        for (std::int64_t t = tile * tokens_per_tile; t < c.s.end(tile); ++t) sum_token<A>(c, routes, t);
    });
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

Tokens tokens_of(const PeerGroup& g, const TokenShape& s, Type type) {
    check_sizes(g, s, type);
    return {g,       s.tokens, tiles_of(s.tokens), s.capacity, s.cols * static_cast<std::int64_t>(size_of(type)),
            s.top_k, s.experts};
}

unsigned blocks_of(const PeerGroup& g, std::int64_t tiles, int threads) {
    return blocks_for(tiles > 0 ? tiles : 1, threads / warp_size / 2, g.blocks);
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
    dispatch_kernel<<<blocks_of(g, d.s.tiles, dispatch_threads), dispatch_threads, Routes::bytes(s.experts),
                      stream_of(stream)>>>(d);
    CUDA_CHECK(cudaGetLastError());
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
    const unsigned blocks = blocks_of(g, c.s.tiles, combine_threads);
    const std::size_t shared = Routes::bytes(s.experts);
    if (rows.type == Type::f32) {
        combine_kernel<Access<float, 4>><<<blocks, combine_threads, shared, stream_of(stream)>>>(c);
    } else {
        combine_kernel<Access<__nv_bfloat16, 8>><<<blocks, combine_threads, shared, stream_of(stream)>>>(c);
    }
    CUDA_CHECK(cudaGetLastError());
}

void gather(const PeerGroup& g, const void* x, void* y, std::int64_t bytes, void* stream) {
    if (bytes % 4 != 0) throw std::runtime_error("cuda: a gather of " + std::to_string(bytes) + " bytes");
    gather_kernel<<<1, gather_threads, 0, stream_of(stream)>>>(g, static_cast<const unsigned*>(x),
                                                               static_cast<unsigned*>(y), bytes / 4);
    CUDA_CHECK(cudaGetLastError());
}

std::int64_t board_bytes(int ranks, std::int64_t tokens) {
    const std::int64_t flags = ranks * tiles_of(tokens > 0 ? tokens : 1);
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
