// Rows of tokens through shared memory to several places, by the copy engine: a warp has its own ring and barriers.
//
// A multiprocessor writes 32 bytes a cycle, however it does it: what counts is that no warp waits for what it has just
// asked for or sent.
#pragma once

#include "kernels/cuda/ptx/barrier.cuh"
#include "kernels/cuda/ptx/tma.cuh"
#include "kernels/cuda/vector.cuh"

namespace moe::cuda {

inline constexpr int spread_warps = 16, spread_threads = spread_warps * warp_size;
inline constexpr unsigned piece_bytes = 2048, most_pieces = 5; // bytes of a piece; pieces of a warp coming in at once
// A row of E4M3 has a scale of 4 bytes for 128 of them: those of a piece travel with it.
inline constexpr unsigned scale_share = 32;

// A warp's pieces with `beside` bytes each and a barrier; they are filled and emptied in turn.
template <unsigned beside>
struct RingMemory {
    static constexpr unsigned place = piece_bytes + beside;
    char rows[spread_warps][most_pieces * place];
    std::uint64_t barriers[spread_warps][most_pieces];
};
template <unsigned beside>
class Ring {
public:
    __device__ explicit Ring(RingMemory<beside>& memory) {
        const unsigned warp = threadIdx.x / warp_size, lane = threadIdx.x % warp_size;
        rows_ = ptx::shared_address(memory.rows[warp]);
        barriers_ = ptx::shared_address(memory.barriers[warp]);
        if (lane < most_pieces) ptx::init_barrier(barriers_ + 8 * lane, 1);
        ptx::fence_barrier_init();
        __syncwarp();
    }
    // One lane asks for the piece that comes `ahead` of the next one to be emptied, and for its scales.
    __device__ void ask(unsigned ahead, const char* from, unsigned bytes, const char* scales = nullptr) const {
        const unsigned at = at_ + ahead < most_pieces ? at_ + ahead : at_ + ahead - most_pieces;
        const unsigned barrier = barriers_ + 8 * at, to = rows_ + at * place;
        ptx::arrive_expecting(barrier, beside > 0 ? bytes + bytes / scale_share : bytes);
        ptx::load_bytes(to, from, bytes, barrier);
        if constexpr (beside > 0) ptx::load_bytes(to + piece_bytes, scales, bytes / scale_share, barrier);
    }
    __device__ void wait() const { ptx::wait(barriers_ + 8 * at_, parity_); }
    __device__ unsigned address() const { return rows_ + at_ * place; } // address of the next piece
    __device__ void next() {
        if (++at_ < most_pieces) return;
        at_ = 0;
        parity_ ^= 1;
    }

private:
    static constexpr unsigned place = RingMemory<beside>::place;
    unsigned rows_, barriers_, at_ = 0, parity_ = 0;
};

// A block's shared memory, before the routes.
template <bool scaled>
struct SpreadMemory {
    static constexpr unsigned beside = scaled ? piece_bytes / scale_share : 0;
    RingMemory<beside> ring;
};

// Rows from one place to several: while pieces go out, the next ones come in. scaled: rows of E4M3 with their scales,
// which lie likewise in a matrix of their own.
template <bool scaled>
class Spreader {
public:
    // rows, scales: the matrices that it writes to.
    __device__ Spreader(SpreadMemory<scaled>& memory, char* rows, char* scales)
        : ring_(memory.ring), rows_(rows), scales_(scales) {}

    // Copies the row to the places that lanes name, null: none. They are written when finish() returns.
    __device__ void spread(const char* from, const char* scales, char* to, unsigned bytes) {
        if (__ballot_sync(all_lanes, to != nullptr) == 0) return;
        for (unsigned at = 0; at < bytes; at += piece_bytes)
            take(from + at, scaled ? scales + at / scale_share : nullptr, to != nullptr ? to + at : nullptr,
                 bytes - at < piece_bytes ? bytes - at : piece_bytes);
    }
    __device__ void finish() {
        for (int i = 0; i < ahead; ++i) {
            pass_on();
            shift(nullptr, 0);
        }
        ptx::wait_stores<0>();
    }

private:
    static constexpr int ahead = most_pieces - 2; // One more piece is leaving, and one may still be.

    __device__ void take(const char* from, const char* scales, char* to, unsigned bytes) {
        ptx::wait_stores_read<1>(); // The piece that lay here has left.
        __syncwarp();
        if (threadIdx.x % warp_size == 0) ring_.ask(held_, from, bytes, scales);
        pass_on();
        shift(to, bytes);
        ++held_;
    }
    // The piece that was taken `ahead` pieces ago.
    __device__ void pass_on() {
        constexpr int oldest = ahead - 1;
        if (bytes_[oldest] == 0) return;
        ring_.wait();
        if (to_[oldest] != nullptr) store(to_[oldest], bytes_[oldest]);
        ptx::commit_stores();
        ring_.next();
        --held_;
    }
    __device__ void store(char* to, unsigned bytes) const {
        ptx::store_bytes(to, ring_.address(), bytes);
        if constexpr (scaled)
            ptx::store_bytes(scales_ + (to - rows_) / scale_share, ring_.address() + piece_bytes, bytes / scale_share);
    }
    __device__ void shift(char* to, unsigned bytes) {
#pragma unroll
        for (int i = ahead - 1; i > 0; --i) to_[i] = to_[i - 1], bytes_[i] = bytes_[i - 1];
        to_[0] = to;
        bytes_[0] = bytes;
    }

    Ring<SpreadMemory<scaled>::beside> ring_;
    char *rows_, *scales_;
    unsigned held_ = 0;
    char* to_[ahead] = {};
    unsigned bytes_[ahead] = {}; // 0: no piece
};

} // namespace moe::cuda
