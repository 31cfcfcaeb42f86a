// Sums of rows through shared memory, by pairs of warps: one looks up what to sum and asks for it, the other sums.
//
// A multiprocessor reads up to 128 bytes a cycle where few and large pieces are on their way and little else is done
// for each of them. So the asking warp alone knows tiles and rows, and it asks for the next tile's while this one's are
// summed.
#pragma once

#include "kernels/cuda/ptx/barrier.cuh"
#include "kernels/cuda/ptx/tma.cuh"
#include "kernels/cuda/vector.cuh"

namespace moe::cuda {

inline constexpr int sum_pairs = 8, sum_threads = 2 * sum_pairs * warp_size; // The warps that sum come first.
inline constexpr int sending_pairs = 5;                     // pairs that send before they take tokens of their own rank
inline constexpr unsigned sum_piece = 4096, sum_pieces = 5; // bytes of a piece; pieces of a pair coming in at once

// What a pair sums for the tokens of a tile: the rows of token t are from[end[t - 1]] up to from[end[t]].
struct Sums {
    static constexpr int most_rows = warp_size, most_tokens = 8; // A lane takes a copy here or a sum from elsewhere.
    static constexpr int settle = -1, over = -2; // in place of tokens: all flags so far rise; nothing comes any more
    const char* from[most_rows];
    char* to[most_tokens]; // targets; null = nowhere
    int end[most_tokens];
    int tokens, flag; // flag: rises when the sums are written, -1 = none
};

// A block's shared memory, before the routes. Each barrier completes a phase when its place is filled, or is free.
struct SumMemory {
    static constexpr unsigned tiles = 2;                // descriptions of a pair
    char rows[sum_pairs][(sum_pieces + 1) * sum_piece]; // pieces that come in, and the sum that leaves
    Sums sums[sum_pairs][tiles];
    std::uint64_t filled[sum_pairs][sum_pieces], emptied[sum_pairs][sum_pieces];
    std::uint64_t told[sum_pairs][tiles], done[sum_pairs][tiles];

    // By one warp for its pair; the block meets before either warp walks.
    __device__ void initialise(int pair) {
        const unsigned lane = threadIdx.x % warp_size;
        for (std::uint64_t* barriers : {filled[pair], emptied[pair]})
            if (lane < sum_pieces) ptx::init_barrier(ptx::shared_address(barriers + lane), 1);
        for (std::uint64_t* barriers : {told[pair], done[pair]})
            if (lane < tiles) ptx::init_barrier(ptx::shared_address(barriers + lane), 1);
        ptx::fence_barrier_init();
    }
};

// The way of one warp of a pair along a ring of places that one of the two fills and the other empties.
template <unsigned places>
class Walk {
public:
    __device__ Walk(std::uint64_t (&filled)[places], std::uint64_t (&emptied)[places])
        : filled_(ptx::shared_address(filled)), emptied_(ptx::shared_address(emptied)) {}

    __device__ unsigned at() const { return at_; }
    __device__ unsigned filled() const { return filled_ + 8 * at_; }
    __device__ unsigned emptied() const { return emptied_ + 8 * at_; }
    __device__ void wait_filled() const { ptx::wait(filled(), parity_); }
    __device__ void wait_emptied() const { ptx::wait(emptied(), parity_ ^ 1); } // At first all are.
    __device__ void next() {
        if (++at_ < places) return;
        at_ = 0;
        parity_ ^= 1;
    }

private:
    unsigned filled_, emptied_, at_ = 0, parity_ = 0;
};

// The warp of a pair that asks. Its lanes describe a tile in sums(), then bring() it.
class Bringer {
public:
    __device__ Bringer(SumMemory& memory, int pair)
        : pieces_(memory.filled[pair], memory.emptied[pair]),
          tiles_(memory.told[pair], memory.done[pair]),
          sums_(memory.sums[pair]),
          rows_(ptx::shared_address(memory.rows[pair])) {}

    // The description of the next tile, as soon as it is free.
    __device__ Sums& sums() const {
        tiles_.wait_emptied();
        return sums_[tiles_.at()];
    }
    // tokens: how many are described, with rows of `bytes`; or Sums::settle, Sums::over.
    __device__ void bring(int tokens, int flag, unsigned bytes) {
        Sums& sums = this->sums();
        __syncwarp();
        if (threadIdx.x % warp_size == 0) {
            sums.tokens = tokens;
            sums.flag = flag;
            ptx::arrive(tiles_.filled());
            for (int t = 0, begin = 0; t < tokens; begin = sums.end[t++])
                ask(sums.from + begin, sums.from + sums.end[t], bytes);
        }
        tiles_.next();
        __syncwarp();
    }

private:
    // A piece of all rows of a token, then the next piece of them.
    __device__ void ask(const char* const* begin, const char* const* end, unsigned bytes) {
        if (begin == end) return;
        for (unsigned at = 0; at < bytes; at += sum_piece) {
            const unsigned left = bytes - at < sum_piece ? bytes - at : sum_piece;
            for (const char* const* row = begin; row != end; ++row) {
                pieces_.wait_emptied();
                ptx::arrive_expecting(pieces_.filled(), left);
                ptx::load_bytes(rows_ + pieces_.at() * sum_piece, *row + at, left, pieces_.filled());
                pieces_.next();
            }
        }
    }

    Walk<sum_pieces> pieces_; // walked by lane 0 alone
    Walk<SumMemory::tiles> tiles_;
    Sums* sums_;
    unsigned rows_;
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

// The warp of a pair that sums, in FP32 and in the order of the rows.
template <class A, class Raise>
class Summer {
public:
    __device__ Summer(SumMemory& memory, int pair, Raise raise)
        : pieces_(memory.filled[pair], memory.emptied[pair]),
          tiles_(memory.told[pair], memory.done[pair]),
          promises_(raise),
          sums_(memory.sums[pair]),
          rows_(memory.rows[pair]) {}

    // All tiles that come, with rows of `bytes`; a token without rows gets zeros.
    __device__ void sum(unsigned bytes) {
        while (true) {
            tiles_.wait_filled();
            const Sums& sums = sums_[tiles_.at()];
            const int tokens = sums.tokens;
            if (tokens < 0) promises_.keep_all();
            if (tokens == Sums::over) return;
            bool sent = false;
            for (int t = 0, begin = 0; t < tokens; begin = sums.end[t++]) {
                if (sums.to[t] == nullptr) continue;
                sum(sums.to[t], sums.end[t] - begin, bytes);
                sent = true;
            }
            if (sums.flag >= 0) promise(sums.flag, sent);
            __syncwarp();
            if (threadIdx.x % warp_size == 0) ptx::arrive(tiles_.emptied());
            tiles_.next();
        }
    }

private:
    static constexpr unsigned out = sum_pieces * sum_piece;  // offset from which the sum leaves
    static constexpr int packs = sum_piece / 16 / warp_size; // packs of a lane

    __device__ static unsigned pack(int t) {
        return 16 * (static_cast<unsigned>(t) * warp_size + threadIdx.x % warp_size);
    }
    // The rows of one token.
    __device__ void sum(char* to, int rows, unsigned bytes) {
        for (unsigned at = 0; at < bytes; at += sum_piece) {
            float held[packs][A::width] = {};
            for (int row = 0; row < rows; ++row) add(held);
            send(to + at, bytes - at < sum_piece ? bytes - at : sum_piece, held);
        }
    }
    // All of a piece, also where the row has ended: that is not sent.
    __device__ void add(float (&held)[packs][A::width]) {
        pieces_.wait_filled();
        const char* const row = rows_ + pieces_.at() * sum_piece;
#pragma unroll
        for (int t = 0; t < packs; ++t) {
            const uint4 words = *reinterpret_cast<const uint4*>(row + pack(t));
            const typename A::Held four{{words.x, words.y, words.z, words.w}};
#pragma unroll
            for (int i = 0; i < A::width; ++i) held[t][i] += four[i];
        }
        __syncwarp(); // All lanes have read the piece.
        if (threadIdx.x % warp_size == 0) ptx::arrive(pieces_.emptied());
        pieces_.next();
    }
    __device__ void send(char* to, unsigned left, const float (&held)[packs][A::width]) {
        ptx::wait_stores_read<0>(); // The sum that lay there has left.
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
    // Rows that were summed since the last one are behind this flag.
    __device__ void promise(int flag, bool sent) {
        if (sent)
            promises_.promise(flag);
        else
            promises_.raise(flag);
    }

    Walk<sum_pieces> pieces_;
    Walk<SumMemory::tiles> tiles_;
    Promises<Raise> promises_;
    const Sums* sums_;
    char* rows_;
};

} // namespace moe::cuda
