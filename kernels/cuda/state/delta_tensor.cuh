// A gated delta rule's chunks on the tensor cores: what is kept of them in `work`, and how a head's chunks come to the
// block that passes its state on.
//
// Operands are BF16 and sums FP32. Queries, keys, values and their gradients enter products as they came: what makes
// rows units, decays and beta multiply sums, or the other operand before it is rounded.
#pragma once

#include "kernels/cuda/ptx/tma.cuh"
#include "kernels/cuda/state/delta_tiles.cuh"
#include "kernels/cuda/state/state_tiles.cuh"

namespace moe::cuda::delta {

inline constexpr int slice = 32;                 // columns of the state that a block passes on
inline constexpr int passing = slice / 16;       // warps that do, each 16 columns
inline constexpr int pieces = rows / pack;       // of 8 positions
inline constexpr int key_pieces = widest / pack; // of 8 columns
using Wide = Tile<widest, false>;                // rows of queries, keys, values or gradients
using Square = Cores<rows>;
using Turned = Cores<rows>; // [column, position]: values' matrices lie by columns, so that a slice is in one piece
using Tall = Cores<widest>; // [position, column], or of a state [column of values, column of keys]

__device__ inline const Element* elements(Src x) { return static_cast<const Element*>(x.data); }

// A chunk of a value head, and what is kept of it in `work` behind its sums.
struct Kept : Place {
    using Place::Place;
    // Factors of positions: e times what makes a query a unit, f times what makes a key one; what is carried of the
    // state. Then what makes units by itself, and for gradients the gates.
    static constexpr int from_before = 0, to_behind = rows, carried = 2 * rows, factors = 2 * rows + 4;
    __device__ float* vectors() const { return sums() + rows; }
    __device__ float* unit_queries() const { return vectors() + factors; }
    __device__ float* unit_keys() const { return unit_queries() + rows; }
    __device__ Gates* gates() const { return reinterpret_cast<Gates*>(unit_keys() + rows); }

    static constexpr int tall = rows * widest, square = rows * rows, whole = widest * widest;
    __device__ Element* w() const { return reinterpret_cast<Element*>(begin() + rows * rows); } // -W [rows, keys]
    __device__ Element* u() const { return w() + tall; }                                        // U^T
    __device__ Element* scores() const { return u() + tall; }                                   // [rows, rows]
    // Of gradients:
    __device__ Element* inverse() const { return scores() + square; } // (I + A)^-1
    __device__ Element* fresh() const { return inverse() + square; }  // V'^T and its gradient's
    __device__ Element* dfresh() const { return fresh() + tall; }
    __device__ Element* state() const { return dfresh() + tall; } // S^T before the chunk, its gradient behind it
    __device__ Element* dstate() const { return state() + whole; }
    // Sums of the value heads of a key head so far, where its first one is: as threads hold them.
    __device__ float* dq() const { return reinterpret_cast<float*>(dstate() + whole); }
    __device__ float* dk() const { return dq() + tall; }
};

inline constexpr int gate_packs = sizeof(Gates) / 16;

// True where these kernels take a call: heads of 128 columns, operands in whole packs of BF16.
inline bool tensor_takes(const Rule& r, std::initializer_list<Src> operands) {
    for (const Src x : operands)
        if (x.type != Type::bf16 || !aligned(x)) return false;
    return r.s.key_dim == widest && r.s.value_dim == widest && aligned(r.work);
}

// Stages of a chunk's operands in shared memory. The last warp brings them, the others take them and let go.
template <int stages, int stage_bytes, int takers>
class Ring {
public:
    static constexpr int bytes = stages * stage_bytes;
    // All threads come; barriers: 2 stages of them.
    __device__ Ring(const unsigned char* memory, std::uint64_t* barriers)
        : memory_(ptx::shared_address(memory)), barriers_(ptx::shared_address(barriers)) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < stages; ++i) {
                ptx::init_barrier(full(i), 1 + warp_size);
                ptx::init_barrier(empty(i), takers * warp_size);
            }
            ptx::fence_barrier_init();
        }
        __syncthreads();
    }
    // The stage of the next chunk, once nobody needs what it held; `coming` bytes will be brought.
    __device__ unsigned to_fill(unsigned coming) {
        if (turn_ > 0) ptx::wait(empty(at_), (turn_ - 1) & 1);
        if (threadIdx.x % warp_size == 0) ptx::arrive_expecting(full(at_), coming);
        __syncwarp();
        return memory_ + static_cast<unsigned>(at_ * stage_bytes);
    }
    __device__ unsigned filling() const { return full(at_); }
    // Behind the bringing warp's own copies.
    __device__ void brought() const { ptx::arrive_behind_copies(full(at_)); }
    // The next chunk's operands.
    __device__ unsigned filled() {
        ptx::wait(full(at_), turn_ & 1);
        return memory_ + static_cast<unsigned>(at_ * stage_bytes);
    }
    // By every thread that has read: racecheck does not follow one that arrives for its warp.
    __device__ void let_go() const { ptx::arrive(empty(at_)); }
    __device__ void next() {
        if (++at_ == stages) at_ = 0, ++turn_;
    }

private:
    __device__ unsigned full(int i) const { return barriers_ + static_cast<unsigned>(i * 16); }
    __device__ unsigned empty(int i) const { return full(i) + 8; }
    unsigned memory_, barriers_, turn_ = 0;
    int at_ = 0;
};

// What one warp hands another of each chunk, in lines of 16 bytes for each lane: two chunks may be on their way.
template <int lines>
class Handing {
public:
    static constexpr int line = 16 * warp_size, bytes = passing * 2 * lines * line, barriers = passing * 4;
    // pair: which of the block's. All threads come, and meet before any of them hands or takes.
    __device__ Handing(const unsigned char* memory, std::uint64_t* barriers_of_all, int pair)
        : memory_(ptx::shared_address(memory) + static_cast<unsigned>(pair * 2 * lines * line)),
          barriers_(ptx::shared_address(barriers_of_all) + static_cast<unsigned>(pair * 32)) {
        if (threadIdx.x == 0)
            for (int i = 0; i < barriers; ++i)
                ptx::init_barrier(ptx::shared_address(barriers_of_all) + static_cast<unsigned>(i * 8), warp_size);
    }
    // A lane's place in the first line of the next chunk, once the other warp needs no more what it held.
    __device__ unsigned to_fill() const {
        if (turn_ > 0) ptx::wait(empty(), (turn_ - 1) & 1);
        return place();
    }
    __device__ unsigned filled() const {
        ptx::wait(full(), turn_ & 1);
        return place();
    }
    __device__ void hand() { done(full()); }
    __device__ void let_go() { done(empty()); }

private:
    __device__ unsigned full() const { return barriers_ + at_ * 16; }
    __device__ unsigned empty() const { return full() + 8; }
    __device__ unsigned place() const { return memory_ + at_ * lines * line + threadIdx.x % warp_size * 16; }
    __device__ void done(unsigned barrier) {
        ptx::arrive(barrier);
        at_ ^= 1;
        if (at_ == 0) ++turn_;
    }
    unsigned memory_, barriers_, at_ = 0, turn_ = 0;
};

// Rows of a chunk, by a warp's copies of 16 bytes; those behind the last are zeros. (The copy engine takes as long for
// a row as for a tile.)
template <int columns>
__device__ void bring_rows(unsigned tile, const Element* x, int step, int n) {
    using To = Tile<columns, false>;
    constexpr int at_once = warp_size / To::packs;
    const int lane = static_cast<int>(threadIdx.x) % warp_size, first = lane / To::packs, of_row = lane % To::packs;
    const Element* from = x + first * step + of_row * pack;
#pragma unroll
    for (int u = 0; u < rows / at_once; ++u, from += at_once * step) {
        const bool there = first + u * at_once < n;
        copy_or_clear(To::at(tile, first + u * at_once, of_row), there ? from : x, there);
    }
}

// One of the factors of two neighbouring positions.
__device__ inline float2 factors_of(unsigned vectors, int which, int i) {
    float2 two;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(two.x), "=f"(two.y)
                 : "r"(vectors + static_cast<unsigned>((which + i) * 4))
                 : "memory");
    return two;
}

// 16 columns of a state that a warp passes on, [column of values, column of keys]: FP32 in registers.
struct Passed {
    float sum[key_pieces][4] = {};

    __device__ void times(float by) {
#pragma unroll
        for (int i = 0; i < key_pieces * 4; ++i) sum[i / 4][i % 4] *= by;
    }
    // Rounded, as the left operand of products with queries and keys.
    __device__ void round(unsigned (&a)[key_pieces / 2][4]) const {
#pragma unroll
        for (int i = 0; i < key_pieces / 2; ++i) left_of(sum[2 * i], sum[2 * i + 1], a[i]);
    }
    // += a^T of the chunk's positions times their rows in a tile.
    template <class Layout>
    __device__ void add(const unsigned (&a)[rows / 16][4], unsigned tile) {
#pragma unroll
        for (int block = 0; block < rows / 16; ++block)
#pragma unroll
            for (int c = 0; c < key_pieces / 2; ++c) {
                unsigned b[4];
                Layout::right_across(tile, c, block, b);
                multiply(sum[2 * c], sum[2 * c + 1], a[block], b);
            }
    }
};

// Of 16 columns a product with the rows of a tile, [column of values, position].
template <class Layout>
__device__ void with_rows(float (&sum)[pieces][4], const unsigned (&a)[key_pieces / 2][4], unsigned tile) {
#pragma unroll
    for (int block = 0; block < key_pieces / 2; ++block)
#pragma unroll
        for (int j = 0; j < pieces / 2; ++j) {
            unsigned b[4];
            Layout::right(tile, j, block, b);
            multiply(sum[2 * j], sum[2 * j + 1], a[block], b);
        }
}

// Sums [column of values, position] times a factor of each position.
__device__ inline void scale(float (&sum)[pieces][4], unsigned vectors, int which) {
#pragma unroll
    for (int j = 0; j < pieces; ++j) {
        const float2 by = factors_of(vectors, which, j * 8 + static_cast<int>(threadIdx.x) % 4 * 2);
        sum[j][0] *= by.x, sum[j][1] *= by.y, sum[j][2] *= by.x, sum[j][3] *= by.y;
    }
}

// 16 columns from `first` on of a matrix [column, ...], as a warp's left operand, to global memory.
template <class Layout, int blocks>
__device__ void store_left(Element* x, int first, const unsigned (&a)[blocks][4]) {
#pragma unroll
    for (int i = 0; i < blocks * 4; ++i) Layout::store(x, first / pack + i % 2, i / 4 * 2 + i % 4 / 2, a[i / 4][i % 4]);
}

// The forward, and the states of the gradients' (o empty); then the gradients of the states and of all else, but for
// those of the heads' weights, whose parts are left in sums(). Of calls that tensor_takes.
void run_tensor_states(const Rule& rule, Dst o, cudaStream_t stream);
void run_tensor_grads(const Rule& rule, Src dout, Dst dc, Dst dp, cudaStream_t stream);

} // namespace moe::cuda::delta
