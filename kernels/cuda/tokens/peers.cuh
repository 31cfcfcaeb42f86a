// The tools that calls between peers share: boards with flags, the beginning and the end of a call, places of copies.
//
// Flags hold the number of the call that raised them. Numbers only grow and each rank counts its own calls, so nothing
// is reset between calls, and a captured call counts on when it is replayed. A rank touches another one's memory only
// behind that one's `ready`: before, an earlier op may still read or write there.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/ptx/flags.cuh"
#include "kernels/peers.hpp"

namespace moe::cuda {

// The head of a board; flags arrived[ranks][tiles] follow.
struct Board {
    unsigned calls;             // number of calls that have ended here
    unsigned leaving;           // number of blocks that are through
    unsigned next;              // tile that no warp has taken yet
    unsigned broken;            // set when a wait was given up: none waits any more
    unsigned ready[most_peers]; // call that each rank has begun
    unsigned unused[20];
};
static_assert(sizeof(Board) == 128);

__device__ inline Board* board_of(const PeerGroup& g, int rank) { return reinterpret_cast<Board*>(g.board[rank]); }
__device__ inline unsigned* arrived(const PeerGroup& g, int at, int from, std::int64_t tiles, std::int64_t tile) {
    return reinterpret_cast<unsigned*>(g.board[at] + sizeof(Board)) + from * tiles + tile;
}

// The operand at the same place of another rank.
template <class T>
__device__ T* at_rank(const PeerGroup& g, T* mine, int rank) {
    const std::ptrdiff_t offset = reinterpret_cast<const char*>(mine) - g.arena[g.rank];
    return reinterpret_cast<T*>(g.arena[rank] + offset);
}

// Waits until rank `peer` has raised the flag in this rank's board to `call`, or the group's patience is over.
__device__ inline void wait_for(const PeerGroup& g, const unsigned* flag, unsigned call, int peer) {
    std::uint64_t since = 0;
    for (unsigned looks = 1; static_cast<int>(ptx::acquire(flag) - call) < 0; ++looks) {
        if (looks % 256 != 0 || g.patience <= 0.0) continue;
        volatile unsigned* broken = &board_of(g, g.rank)->broken;
        if (*broken != 0) return;
        const std::uint64_t now = ptx::nanoseconds();
        if (since == 0) since = now;
        if (static_cast<double>(now - since) < 1e9 * g.patience) continue;
        *broken = 1;
        *static_cast<volatile int*>(g.trouble) = 1 + peer;
        __threadfence_system();
        return;
    }
}

// One call: its number, and the others told that this rank's memory is free for it.
__device__ inline unsigned begin_call(const PeerGroup& g) {
    const unsigned call = *static_cast<volatile unsigned*>(&board_of(g, g.rank)->calls) + 1;
    const int peer = static_cast<int>(threadIdx.x);
    if (blockIdx.x == 0 && peer < g.ranks && peer != g.rank) ptx::release(&board_of(g, peer)->ready[g.rank], call);
    return call;
}
// The whole block waits until all have begun it.
__device__ inline void wait_for_ranks(const PeerGroup& g, unsigned call) {
    const int peer = static_cast<int>(threadIdx.x);
    if (peer < g.ranks && peer != g.rank) wait_for(g, &board_of(g, g.rank)->ready[peer], call, peer);
    __syncthreads();
}
// The flag of rank `from` as a whole, where no tiles have flags.
__device__ inline unsigned* all_arrived(const PeerGroup& g, int at, int from) { return arrived(g, at, from, 1, 0); }

// Leaves the board as the next call expects it. met: no rank goes on before all others are through, as they read here.
__device__ inline void end_call(const PeerGroup& g, unsigned call, bool met) {
    __syncthreads();
    if (threadIdx.x != 0) return;
    Board* mine = board_of(g, g.rank);
    __threadfence();
    if (atomicAdd(&mine->leaving, 1u) != gridDim.x - 1) return;
    if (met) {
        for (int r = 0; r < g.ranks; ++r)
            if (r != g.rank) ptx::release(all_arrived(g, r, g.rank), call);
        for (int r = 0; r < g.ranks; ++r)
            if (r != g.rank) wait_for(g, all_arrived(g, g.rank, r), call, r);
    }
    mine->leaving = 0;
    mine->next = 0;
    __threadfence();
    mine->calls = call;
}

// A warp says that its writes for a tile are done, to the ranks in `to`.
__device__ inline void raise(const PeerGroup& g, unsigned to, std::int64_t tiles, std::int64_t tile, unsigned call) {
    __syncwarp();
    const int lane = static_cast<int>(threadIdx.x % warp_size);
    if (to >> lane & 1u) ptx::release(arrived(g, lane, g.rank, tiles, tile), call);
}
// A warp waits for the writes of `from` ranks.
__device__ inline void await(const PeerGroup& g, unsigned from, std::int64_t tiles, std::int64_t tile, unsigned call) {
    const int lane = static_cast<int>(threadIdx.x % warp_size);
    if (from >> lane & 1u) wait_for(g, arrived(g, g.rank, lane, tiles, tile), call, lane);
    __syncwarp();
}
__device__ inline unsigned others(const PeerGroup& g) { return ((1u << g.ranks) - 1) & ~(1u << g.rank); }

// Exclusive sums of n numbers by one warp, in place.
__device__ inline void sum_up(int* numbers, int n) {
    const int lane = static_cast<int>(threadIdx.x % warp_size);
    int before = 0;
    for (int base = 0; base < n; base += warp_size) {
        const int own = base + lane < n ? numbers[base + lane] : 0;
        int sum = own;
        for (int offset = 1; offset < warp_size; offset *= 2) {
            const int left = __shfl_up_sync(all_lanes, sum, offset);
            if (lane >= offset) sum += left;
        }
        if (base + lane < n) numbers[base + lane] = before + sum - own;
        before += __shfl_sync(all_lanes, sum, warp_size - 1);
    }
}

// The places where the copies of some ranks' tokens go, by expert, in shared memory. The whole block makes it.
struct Routes {
    int experts, local, from; // experts of all ranks, experts of one; the first of those ranks
    int* all;                 // rows of all ranks for the experts before
    int* first;               // row of each rank's first copy for the expert, in its own expert-major order
    int* ahead;               // rows for the expert of the ranks before each rank

    static std::size_t bytes(int experts, int ranks) {
        return sizeof(int) * static_cast<std::size_t>(experts) * static_cast<std::size_t>(2 * ranks + 1);
    }

    __device__ Routes(const PeerGroup& g, int count, const std::int32_t* all_counts, int* memory, int begin, int ranks)
        : experts(count),
          local(count / g.ranks),
          from(begin),
          all(memory),
          first(memory + count),
          ahead(memory + (1 + ranks) * count) {
        for (int e = static_cast<int>(threadIdx.x); e < experts; e += static_cast<int>(blockDim.x)) {
            int sum = 0;
            for (int s = 0; s < g.ranks; ++s) {
                const int rows = static_cast<int>(count_of(all_counts, s * experts + e)), at = (s - from) * experts + e;
                if (s >= from && s < from + ranks) first[at] = rows, ahead[at] = sum;
                sum += rows;
            }
            all[e] = sum;
        }
        __syncthreads();
        const int warps = static_cast<int>(blockDim.x) / warp_size;
        for (int i = static_cast<int>(threadIdx.x) / warp_size; i <= ranks; i += warps)
            sum_up(all + i * experts, experts);
        __syncthreads();
    }

    // The expert of a rank's row, which some expert has: the last one whose rows begin there or before, as others have
    // none.
    __device__ int expert_of(int rank, int row) const {
        const int* begins = first + (rank - from) * experts;
        int low = 0, high = experts;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            (begins[middle] <= row ? low : high) = middle;
        }
        return low;
    }
    // The place at the rank of its expert.
    __device__ int place_of(int rank, int row, int expert) const {
        const int at = (rank - from) * experts + expert;
        return row - first[at] + all[expert] - all[expert / local * local] + ahead[at];
    }
};

} // namespace moe::cuda
