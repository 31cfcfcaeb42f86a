// What sparse attention's kernels on Hopper's tensor cores share: tiles of gathered rows, their loads, their barriers.
//
// A CTA has a warpgroup that loads and two that multiply. Rows that lie anywhere are copied 16 bytes at a time into the
// swizzle that the tensor cores read (wgmma.cuh): the copy engine takes boxes, which keys of a list are not.
#pragma once

#include "kernels/cuda/attention/attention_tensor.cuh"
#include "kernels/cuda/sparse/sparse.cuh"

#include <initializer_list>

namespace moe::cuda::sparse_tensor {

using tensor_attention::log2_e, tensor_attention::ln_2, tensor_attention::Place;

// Columns of a latent key, and those that are the value; rows of a tile that stays; stages of what streams.
inline constexpr int wide = 576, value_wide = 512, tile = 64, stages = 2;
inline constexpr int consumers = 2, threads = 128 * (1 + consumers), loaders = 64; // threads that load one stage
inline constexpr int alignment = 1024;

// Bytes of a tile; its boxes have 64 columns.
__host__ __device__ constexpr int box_bytes(int rows) { return rows * 128; }
__host__ __device__ constexpr int tile_bytes(int rows, int width) { return width / 64 * box_bytes(rows); }

// Operands of products (wgmma.cuh) in a tile of `rows` rows: 16 contracted columns, and 16 contracted rows.
template <int rows>
__device__ std::uint64_t along_columns(unsigned at, int slice) {
    return ptx::describe<box_bytes(rows)>(at + slice / 4 * box_bytes(rows)) + slice % 4 * ptx::k16_step<false>;
}
template <int rows>
__device__ std::uint64_t along_rows(unsigned at, int slice) {
    return ptx::describe<box_bytes(rows)>(at) + slice * ptx::k16_step<true>;
}

// The place of two columns, of which the first is even, in the first box of a tile.
__device__ inline unsigned swizzled(unsigned at, int row, int column) {
    return at + row * 128 + ((column / 8) ^ (row % 8)) * 16 + column % 8 * 2;
}
__device__ inline void write_two(unsigned at, unsigned two) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(two) : "memory");
}
__device__ inline void write_float(unsigned at, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory");
}
__device__ inline float read_float(unsigned at) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
    return x;
}
__device__ inline unsigned read_word(unsigned at) {
    unsigned x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
    return x;
}
__device__ inline float2 unpack_two(unsigned two) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&two));
}
__device__ inline unsigned pack_two(float first, float second) {
    const __nv_bfloat162 two = __floats2bfloat162_rn(first, second);
    return *reinterpret_cast<const unsigned*>(&two);
}

// 16 bytes to shared memory, or 16 zeros.
__device__ inline void copy_async(unsigned to, const void* from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending>
__device__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Numbers of the rows that a thread copies of a tile: eight threads take 128 bytes of a row, `count` threads the tile.
// -1: zeros are wanted.
template <int rows, int count>
struct TileRows {
    static constexpr int step = count / 8, each = rows / step;
    static_assert(rows % step == 0);
    int at[each];

    // number(r): of row r.
    template <class Number>
    __device__ void find(int thread, const Number& number) {
#pragma unroll
        for (int i = 0; i < each; ++i) at[i] = number(thread / 8 + i * step);
    }
    // Begins the copies out of rows of `width` elements.
    template <int width>
    __device__ void copy(unsigned to, int thread, const __nv_bfloat16* from) const {
        static_assert(width % 64 == 0);
        const int lane = thread % 8;
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const int row = thread / 8 + i * step;
            const __nv_bfloat16* const source = from + std::int64_t{max(at[i], 0)} * width + lane * 8;
            const unsigned target = to + row * 128 + (lane ^ row % 8) * 16;
#pragma unroll
            for (int box = 0; box < width / 64; ++box)
                copy_async(target + box * box_bytes(rows), source + box * 64, at[i] >= 0);
        }
    }
};

// The first `rows` of a tile's rows lie one behind the other, of which `there` are there.
template <int rows, int width, int count>
__device__ void copy_rows(unsigned to, int thread, const __nv_bfloat16* from, int there) {
    TileRows<rows, count> tile_rows;
    tile_rows.find(thread, [&](int row) { return row < there ? row : -1; });
    tile_rows.template copy<width>(to, thread, from);
}

// The row of key number j of a list; -1 behind the last.
__device__ inline int row_of_key(const KeyPlaces& z, const KeyList& list, std::int64_t j) {
    return j < list.count ? static_cast<int>(z.row_of(list.at(j), list.sequence)) : -1;
}

// Copies that a thread began have come and are seen by the tensor cores of whoever waits for the barrier.
__device__ inline void announce(unsigned barrier) {
    commit_copies();
    wait_copies<0>();
    ptx::fence_async_proxy();
    ptx::arrive(barrier);
}

// The number of a stage's use says where in the ring it is.
__device__ inline int stage_of(int use) { return use % stages; }
__device__ inline unsigned parity_of(int use) { return static_cast<unsigned>(use / stages % 2); }

// Whether the kernels take these shapes and operands.
inline bool takes(const LatentShape& s, const std::int32_t* keys, std::initializer_list<Src> operands) {
    return s.qk_dim == wide && s.v_dim == value_wide && keys != nullptr && s.keys.batch * s.keys.seq_k < INT_MAX &&
           std::all_of(operands.begin(), operands.end(),
                       [](const Src& x) {
                           return x.type == Type::bf16 && reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0;
                       }) &&
           sm90::multiprocessors() > 0;
}

} // namespace moe::cuda::sparse_tensor
