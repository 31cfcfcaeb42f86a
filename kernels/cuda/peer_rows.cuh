// Rows of tokens through shared memory, brought and sent by the copy engine: a warp has its own ring and barriers.
//
// A multiprocessor writes 32 bytes a cycle, however it does it, and reads twice as many where enough of them are on
// their way: what counts is that no warp waits for what it has just asked for or sent.
#pragma once

#include "kernels/cuda/ptx/barrier.cuh"
#include "kernels/cuda/ptx/tma.cuh"
#include "kernels/cuda/vector.cuh"

namespace moe::cuda {

inline constexpr int peer_warps = 16, peer_threads = peer_warps * warp_size;
inline constexpr unsigned piece_bytes = 2048, most_pieces = 5; // bytes of a piece; pieces of a warp coming in at once
// A row of E4M3 has a scale of 4 bytes for 128 of them: those of a piece travel with it.
inline constexpr unsigned scale_share = 32;

// A warp's pieces with `beside` bytes each and a barrier; they are filled and emptied in turn. `more` bytes of a warp
// lie behind them.
template <unsigned beside, unsigned more>
struct RingMemory {
    static constexpr unsigned place = piece_bytes + beside;
    char rows[peer_warps][most_pieces * place + more];
    std::uint64_t barriers[peer_warps][most_pieces];
};
template <unsigned beside>
class Ring {
public:
    template <unsigned more>
    __device__ explicit Ring(RingMemory<beside, more>& memory) {
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
    __device__ unsigned offset() const { return at_ * place; } // offset of the next piece, in the warp's rows
    __device__ unsigned address() const { return rows_ + offset(); }
    __device__ void next() {
        if (++at_ < most_pieces) return;
        at_ = 0;
        parity_ ^= 1;
    }

private:
    static constexpr unsigned place = RingMemory<beside, 0>::place;
    unsigned rows_, barriers_, at_ = 0, parity_ = 0;
};

// Rows that a warp sums for the tokens of a tile: those of token t are from[end[t - 1]] up to from[end[t]].
struct Sums {
    static constexpr int most_rows = warp_size, most_tokens = 4; // A lane takes a copy here or a sum from elsewhere.
    const char* from[most_rows];
    char* to[most_tokens]; // targets; null = nowhere
    int end[most_tokens];
};

// A block's shared memory, before the routes.
template <bool scaled>
struct SpreadMemory {
    static constexpr unsigned beside = scaled ? piece_bytes / scale_share : 0;
    RingMemory<beside, 0> ring;
};
struct SumMemory {
    RingMemory<0, piece_bytes> ring; // ring of the pieces that come in, and room for the one that leaves
    Sums sums[peer_warps];
};

// Flags that rise when the stores before them are written. A warp looks only when it has sent a few groups more, so
// that it need not wait.
template <class Raise>
class Promises {
public:
    __device__ explicit Promises(Raise raise) : raise_(raise) {}

    // A flag for the groups so far and the one that is committed next.
    __device__ void promise(int flag) { next_ = flag; }
    // The lanes' stores are a group.
    __device__ void commit() {
        ptx::commit_stores();
#pragma unroll
        for (int i = behind; i > 0; --i) flags_[i] = flags_[i - 1];
        flags_[0] = next_;
        next_ = -1;
        ptx::wait_stores<behind>();
        keep(flags_[behind]);
    }
    __device__ void keep_all() {
        ptx::wait_stores<0>();
#pragma unroll
        for (int i = behind - 1; i >= 0; --i) keep(flags_[i]);
        keep(next_);
    }
    __device__ void raise(int flag) { raise_(flag); }

private:
    static constexpr int behind = 3;

    __device__ void keep(int& flag) {
        if (flag >= 0) raise_(flag);
        flag = -1;
    }

    Raise raise_;
    int flags_[behind + 1] = {-1, -1, -1, -1}, next_ = -1;
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

// Sums of rows, in FP32 and in their order. Pieces of all rows of a tile come in one behind the other.
template <class A, class Raise>
class Summer {
public:
    __device__ Summer(SumMemory& memory, Raise raise)
        : ring_(memory.ring),
          promises_(raise),
          sums_(memory.sums[threadIdx.x / warp_size]),
          rows_(memory.ring.rows[threadIdx.x / warp_size]) {}

    // The sums that lanes describe here; sum() reads them.
    __device__ Sums& sums() { return sums_; }

    // Rows of `bytes`; a token without rows gets zeros.
    __device__ void sum(int tokens, unsigned bytes) {
        __syncwarp();
        Cursor cursor{sums_, tokens, bytes};
        for (unsigned ahead = 0; ahead < most_pieces; ++ahead) ask(cursor, ahead);
        for (int t = 0; t < tokens; ++t) {
            char* const to = sums_.to[t];
            const int rows = sums_.end[t] - (t > 0 ? sums_.end[t - 1] : 0);
            if (to == nullptr) continue;
            for (unsigned at = 0; at < bytes; at += piece) {
                const unsigned left = bytes - at < piece ? bytes - at : piece;
                float held[packs][A::width] = {};
                for (int row = 0; row < rows; ++row) add(held, cursor);
                send(to + at, left, held);
            }
            sent_ = true;
        }
        __syncwarp();
    }
    // Rows that were summed since the last one are behind this flag.
    __device__ void promise(int flag) {
        if (sent_)
            promises_.promise(flag);
        else
            promises_.raise(flag);
        sent_ = false;
    }
    __device__ void finish() { promises_.keep_all(); }

private:
    static constexpr unsigned piece = piece_bytes, out = most_pieces * piece; // out: offset from which the sum leaves
    static constexpr int packs = piece / 16 / warp_size;                      // packs of a lane

    // The pieces in the order of their use: of all rows of a token, then the next of them, then the next token's.
    struct Cursor {
        const Sums& sums;
        int tokens;
        unsigned bytes, at = 0;
        int token = -1, row = 0, begin = 0, end = 0;

        __device__ Cursor(const Sums& s, int count, unsigned size) : sums(s), tokens(count), bytes(size) {
            next_token();
        }
        __device__ bool done() const { return token >= tokens; }
        __device__ void next() {
            if (++row < end) return;
            row = begin;
            at += piece;
            if (at >= bytes) next_token();
        }
        __device__ void next_token() {
            do {
                begin = row = end;
                at = 0;
                if (++token >= tokens) return;
                end = sums.end[token];
            } while (begin == end);
        }
    };

    __device__ void ask(Cursor& cursor, unsigned ahead) const {
        if (cursor.done()) return;
        const unsigned left = cursor.bytes - cursor.at;
        if (threadIdx.x % warp_size == 0)
            ring_.ask(ahead, sums_.from[cursor.row] + cursor.at, left < piece ? left : piece);
        cursor.next();
    }
    __device__ static unsigned pack(int t) {
        return 16 * (static_cast<unsigned>(t) * warp_size + threadIdx.x % warp_size);
    }
    // All of a piece, also where the row has ended: that is not sent.
    __device__ void add(float (&held)[packs][A::width], Cursor& cursor) {
        ring_.wait();
        const char* const row = rows_ + ring_.offset();
#pragma unroll
        for (int t = 0; t < packs; ++t) {
            const uint4 words = *reinterpret_cast<const uint4*>(row + pack(t));
            const typename A::Held four{{words.x, words.y, words.z, words.w}};
#pragma unroll
            for (int i = 0; i < A::width; ++i) held[t][i] += four[i];
        }
        __syncwarp(); // All lanes have read the piece.
        ask(cursor, 0);
        ring_.next();
    }
    __device__ void send(char* to, unsigned left, const float (&held)[packs][A::width]) {
        ptx::wait_stores_read<0>(); // The rows that lay there have left.
        __syncwarp();
#pragma unroll
        for (int t = 0; t < packs; ++t) {
            const typename A::Held four = A::pack(held[t]);
            *reinterpret_cast<uint4*>(rows_ + out + pack(t)) = {four.word[0], four.word[1], four.word[2], four.word[3]};
        }
        ptx::fence_async_proxy();
        __syncwarp();
        if (threadIdx.x % warp_size == 0) ptx::store_bytes(to, ptx::shared_address(rows_ + out), left);
        promises_.commit();
    }

    Ring<0> ring_;
    Promises<Raise> promises_;
    Sums& sums_;
    char* rows_;
    bool sent_ = false;
};

} // namespace moe::cuda
