// The kernel that exchanges filled chunks of slots, over windows that are reached by stores and over a network.
//
// Flags hold the number of the call that raised them, as those of peers.cuh do. A member writes into another's window
// behind that one's `ready`: before, it may still copy out what the call before has brought. Each block of a call has
// the same part of a slot at both ends, so that it waits for the same block of the others alone. What arrives is copied
// from the window to y.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/ptx/flags.cuh"
#include "kernels/slot_exchange.hpp"

namespace moe::cuda {

inline constexpr int exchange_threads = 512, most_exchange_blocks = 32;

// The head of a window. Flags ready[members] and full[members][blocks] follow, then the slots that arrive and, where
// there is a network, those that leave.
struct WindowHead {
    unsigned calls;   // number of calls that have ended here
    unsigned leaving; // number of blocks that are through
    unsigned broken;  // set when a wait was given up: none waits any more
    unsigned unused;
    unsigned long long awaited[most_exchange_blocks]; // signals of data that each block has waited for over the network
};

struct Exchange {
    SlotGroup group;
    ChunkShape shape;
    std::int64_t slots; // bytes of all slots of the largest call, in whole pages
    const char* x;
    const std::int32_t* counts;
    char* y;

    __device__ WindowHead* head() const { return reinterpret_cast<WindowHead*>(group.own); }
    __device__ static unsigned* flags(char* window) { return reinterpret_cast<unsigned*>(window + sizeof(WindowHead)); }
    __device__ static unsigned* ready(char* window, int from) { return flags(window) + from; }
    __device__ unsigned* full(char* window, int from) const {
        return flags(window) + group.members + from * most_exchange_blocks + blockIdx.x;
    }
    // Offsets in every member's window.
    __host__ __device__ static std::int64_t head_bytes(int members) {
        const std::int64_t flags = 4 * static_cast<std::int64_t>(members) * (1 + most_exchange_blocks);
        return ceil_div<std::int64_t>(static_cast<std::int64_t>(sizeof(WindowHead)) + flags, 4096) * 4096;
    }
    __device__ std::int64_t arriving(int from) const { return head_bytes(group.members) + from * shape.slot_bytes(); }
    __device__ std::int64_t leaving(int to) const { return arriving(to) + slots; }

    // The part of the slot from one member to another that this block moves.
    __device__ BlockPart part(int from, int to) const {
        const int at = shape.back ? to * group.members + from : from * group.members + to;
        return part_of(shape.moved_bytes(count_of(counts, at)), static_cast<int>(gridDim.x),
                       static_cast<int>(blockIdx.x));
    }

    // One thread waits until arrived() says so, or the group's patience is over.
    template <class Arrived>
    __device__ void wait_for(int member, Arrived arrived) const {
        std::uint64_t since = 0;
        for (unsigned looks = 1; !arrived(); ++looks) {
            if (looks % 256 != 0 || group.patience <= 0.0) continue;
            volatile unsigned* broken = &head()->broken;
            if (*broken != 0) return;
            const std::uint64_t now = ptx::nanoseconds();
            if (since == 0) since = now;
            if (static_cast<double>(now - since) < 1e9 * group.patience) continue;
            *broken = 1;
            *static_cast<volatile int*>(group.trouble) = 1 + member;
            __threadfence_system();
            return;
        }
    }
    __device__ void wait_for(int member, const unsigned* flag, unsigned call) const {
        wait_for(member, [&] { return static_cast<int>(ptx::acquire(flag) - call) >= 0; });
    }
};

// The whole block copies; both ends and the bytes are whole Words. A thread asks for several before it stores the
// first: with one at a time a multiprocessor moved 15 GB/s.
template <class Word>
__device__ void copy_words(char* to, const char* from, std::int64_t bytes) {
    constexpr int batch = 8;
    const std::int64_t words = bytes / static_cast<std::int64_t>(sizeof(Word));
    const Word* __restrict__ source = reinterpret_cast<const Word*>(from);
    Word* __restrict__ target = reinterpret_cast<Word*>(to);
    for (std::int64_t first = threadIdx.x; first < words; first += batch * exchange_threads) {
        Word held[batch];
#pragma unroll
        for (int k = 0; k < batch; ++k)
            if (const std::int64_t i = first + k * exchange_threads; i < words) held[k] = __ldcg(source + i);
#pragma unroll
        for (int k = 0; k < batch; ++k)
            if (const std::int64_t i = first + k * exchange_threads; i < words) target[i] = held[k];
    }
}

// A group that has no remote members.
struct NoNetwork {
    static constexpr bool present = false;
};

// Network: NoNetwork, or as nccl_windows.cu has it.
template <class Word, class Network>
__global__ void __launch_bounds__(exchange_threads) exchange_kernel(Exchange e, Network network) {
    const SlotGroup& g = e.group;
    const std::int64_t slot = e.shape.slot_bytes();
    const unsigned call = *static_cast<volatile unsigned*>(&e.head()->calls) + 1;
    if (blockIdx.x == 0)
        for (int m = static_cast<int>(threadIdx.x); m < g.members; m += exchange_threads) {
            if (m == g.member) continue;
            if (char* window = g.reached[m])
                ptx::release(e.ready(window, g.member), call);
            else if constexpr (Network::present)
                network.tell_ready(m);
        }
    bool sent = false; // over the network
    for (int i = 1; i < g.members; ++i) {
        const int to = (g.member + i) % g.members;
        const BlockPart part = e.part(g.member, to);
        if (part.bytes == 0) continue;
        const char* from = e.x + to * slot + part.first;
        if (char* window = g.reached[to]) {
            if (threadIdx.x == 0) e.wait_for(to, e.ready(g.own, to), call);
            __syncthreads();
            copy_words<Word>(window + e.arriving(g.member) + part.first, from, part.bytes);
            __syncthreads();
            if (threadIdx.x == 0) ptx::release(e.full(window, g.member), call);
        } else if constexpr (Network::present) {
            if (!sent) network.wait_until_ready(e, call);
            copy_words<Word>(g.own + e.leaving(to) + part.first, from, part.bytes);
            network.put(to, e.arriving(g.member) + part.first, e.leaving(to) + part.first, part.bytes);
            sent = true;
        }
    }
    const BlockPart own = e.part(g.member, g.member); // while the others' parts are on their way
    copy_words<Word>(e.y + g.member * slot + own.first, e.x + g.member * slot + own.first, own.bytes);
    if constexpr (Network::present) network.wait_for_data(e);
    for (int i = 1; i < g.members; ++i) {
        const int from = (g.member + g.members - i) % g.members;
        const BlockPart part = e.part(from, g.member);
        if (part.bytes == 0) continue;
        if (g.reached[from] != nullptr) {
            if (threadIdx.x == 0) e.wait_for(from, e.full(g.own, from), call);
            __syncthreads();
        }
        copy_words<Word>(e.y + from * slot + part.first, g.own + e.arriving(from) + part.first, part.bytes);
    }
    if constexpr (Network::present)
        if (sent) network.finish();
    __syncthreads();
    if (threadIdx.x != 0) return;
    __threadfence();
    if (atomicAdd(&e.head()->leaving, 1u) != gridDim.x - 1) return;
    e.head()->leaving = 0;
    __threadfence();
    e.head()->calls = call;
}

// By the widest words that both ends and all parts are made of.
template <class Network>
void launch_exchange(const Exchange& e, Network network, void* stream) {
    const auto together = reinterpret_cast<std::uintptr_t>(e.x) | reinterpret_cast<std::uintptr_t>(e.y) |
                          static_cast<std::uintptr_t>(e.shape.slot_bytes()) |
                          static_cast<std::uintptr_t>(e.shape.chunk_rows * e.shape.row_bytes);
    const auto kernel = together % 16 == 0  ? exchange_kernel<uint4, Network>
                        : together % 4 == 0 ? exchange_kernel<unsigned, Network>
                                            : exchange_kernel<unsigned short, Network>;
    kernel<<<static_cast<unsigned>(e.group.blocks), exchange_threads, 0, stream_of(stream)>>>(e, network);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace moe::cuda
