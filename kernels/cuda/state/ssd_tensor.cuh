// What Mamba-2's kernels on the tensor cores share: steps of a block's heads, and where a call's memory lies.
//
// A chunk has 128 positions, a warp 16 of them. A block takes a chunk of several heads of a group, one after the other:
// queries and keys, which the heads share, are loaded once, and what the next head needs arrives meanwhile.
#pragma once

#include "kernels/cuda/state/ssd_tensor.hpp"
#include "kernels/cuda/state/ssd_tiles.cuh"
#include "kernels/cuda/state/state_tiles.cuh"

#include <algorithm>

namespace moe::cuda::ssd {

inline constexpr int span = 128, warps = threads / warp_size, most_heads = 16; // heads of a block
inline constexpr int widest_of_long_states = 64; // columns of states of more than `span` rows, for their gradients
static_assert(warps * 16 == span);

// A left operand whose rows are multiplied by two numbers of a thread.
__device__ inline void scale_rows(const unsigned (&a)[4], const float (&by)[2], unsigned (&out)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = both(low_of(a[i]) * by[i % 2], high_of(a[i]) * by[i % 2]);
}

// The operands of a call, and what `work` holds: of every chunk but one of each head what it alone leaves in the state
// (FP32), then the state before it (BF16); for gradients the same of their gradients, and vectors of a chunk's
// positions. `Scan::states` and `dstates` are not used.
struct TensorScan : Scan {
    float *left, *vectors, *ends, *partials;
    Element* passed;
    const Element *rows_of_c, *rows_of_do;
    std::int64_t all_heads; // of all sequences
    int parts, each;        // blocks that share a group's heads, heads of each
    int halves;             // blocks of gradients that share the columns of queries and keys, `span` of each

    // Vectors of a chunk's positions, and their places; of_states: the first of `halves`.
    enum Vector : std::uint8_t { of_scores, of_steps, of_states };

    __host__ TensorScan(const StateShape& shape, Src c_, Src p_, Src a_log_, Src dt_bias_, Src skip_, Src dout,
                        float* work, bool grad)
        : Scan(shape, c_, p_, a_log_, dt_bias_, skip_, work, grad, span),
          rows_of_c(static_cast<const Element*>(c_.data)),
          rows_of_do(static_cast<const Element*>(dout.data)),
          all_heads(s.batch * s.value_heads),
          parts(1),
          halves(ceil_div(s.key_dim, span)) {
        const std::int64_t all_left = (grad ? 2 : 1) * all_heads * (chunks - 1) * size;
        left = work;
        passed = reinterpret_cast<Element*>(left + all_left);
        numbers = left + all_left + all_left / 2;
        vectors = numbers + 4 * all_heads * chunks;
        ends = vectors + all_heads * chunks * span * (of_states + halves);
        partials = left; // what chunks leave has been passed on by then
        const std::int64_t blocks = chunks * s.key_heads * s.batch;
        // Enough blocks for the device, as far as there is memory for their sums.
        while (parts < share &&
               (share > parts * (grad ? most_heads : most_heads / 2) ||
                (blocks * parts < multiprocessors() && (!grad || partial_floats(2 * parts) <= all_left))))
            parts *= 2;
        each = ceil_div(share, parts);
        parts = ceil_div(share, each);
    }
    // Sums of queries' and keys' gradients of a block's heads, [part][sequence][group][chunk][which][span, key_dim].
    __host__ __device__ std::int64_t partial_size() const {
        return s.batch * s.key_heads * chunks * 2 * span * s.key_dim;
    }
    __host__ std::int64_t partial_floats(int count) const { return count > 1 ? count * partial_size() : 0; }
    // Floats of `work`, and whether partial sums fit.
    __host__ bool fits(bool grad) const {
        const std::int64_t all_left = (grad ? 2 : 1) * all_heads * (chunks - 1) * size;
        const std::int64_t behind = all_heads * chunks * (4 + (grad ? span * (of_states + halves) + 1 + halves : 0));
        return all_left + all_left / 2 + behind <= s.work(grad) && (!grad || partial_floats(parts) <= all_left);
    }
    __host__ dim3 grid(std::int64_t of_chunks, int roles = 1) const {
        return {static_cast<unsigned>(of_chunks), static_cast<unsigned>(s.key_heads * parts),
                static_cast<unsigned>(s.batch * roles)};
    }
    // States (role 0) or their gradients (1) of a head of all sequences, at one of chunks - 1 places.
    __device__ std::int64_t state_at(int role, std::int64_t head, std::int64_t place) const {
        return ((role * all_heads + head) * (chunks - 1) + place) * size;
    }
    // The state before a chunk, which is not the first; the gradient of that behind one, which is not the last.
    __device__ const Element* before(std::int64_t head, std::int64_t chunk) const {
        return passed + state_at(0, head, chunk - 1);
    }
    __device__ const Element* behind(std::int64_t head, std::int64_t chunk) const {
        return passed + state_at(1, head, chunk);
    }
    __device__ float* vector(int which, std::int64_t head, std::int64_t chunk) const {
        return vectors + ((which * all_heads + head) * chunks + chunk) * span;
    }
    // What a chunk's last sum gets from the states (of each half), then what keys leave.
    __device__ float* last_sums(std::int64_t head, std::int64_t chunk) const {
        return ends + (head * chunks + chunk) * (1 + halves);
    }
    __device__ int step_of_c() const { return static_cast<int>(s.batch * convolved); }
    __device__ int step_of_o() const { return static_cast<int>(s.batch * values); }
};

// A block's sequence, chunk and heads.
struct Share {
    int b, group, part, first, heads; // heads from `first` on
    std::int64_t chunk;
    __device__ Share(const TensorScan& r, std::int64_t chunk_)
        : b(static_cast<int>(blockIdx.z % r.s.batch)),
          group(static_cast<int>(blockIdx.y) / r.parts),
          part(static_cast<int>(blockIdx.y) % r.parts),
          first(group * r.share + part * r.each),
          heads(min(r.each, r.share - part * r.each)),
          chunk(chunk_) {}
    __device__ std::int64_t head(const TensorScan& r, int h) const {
        return std::int64_t{b} * r.s.value_heads + first + h;
    }
};

// The steps of a block's heads at the chunk's positions; behind the last of them steps are 0.
struct Steps {
    float *sum, *step; // [heads][span]: sums of g, times log2(e), and dt
    int* first;        // [span], see Gates; -1 where the document began before the chunk
    __host__ __device__ static constexpr int bytes(int heads) { return (2 * heads + 1) * span * 4; }

    __device__ explicit Steps(unsigned char* memory, int heads)
        : sum(reinterpret_cast<float*>(memory)),
          step(sum + heads * span),
          first(reinterpret_cast<int*>(step + heads * span)) {}

    // All threads take part, and must meet before any of them reads.
    __device__ void read(const TensorScan& r, const Share& at) {
        constexpr int each = span / warp_size;
        constexpr float log2_e = 1.4426950408889634f;
        const int t = static_cast<int>(threadIdx.x), lane = t % warp_size;
        const Place any(r, at.b, at.first, at.chunk);
        if (t < span) {
            const long long start = any.start(min(t, any.n - 1));
            first[t] = start < 0 ? -1 : static_cast<int>(start);
        }
        for (int h = t / warp_size; h < at.heads; h += static_cast<int>(blockDim.x) / warp_size) {
            const Place z(r, at.b, at.first + h, at.chunk);
            const float rate = expf(load(r.a_log, z.weight())) * log2_e, bias = load(r.dt_bias, z.weight());
            float width[each], total = 0.0f, upto[each];
#pragma unroll
            for (int u = 0; u < each; ++u) {
                const int i = lane * each + u;
                width[u] =
                    i < z.n ? fminf(fmaxf(softplus(load(r.p, z.step(i)) + bias), r.s.step_min), r.s.step_max) : 0.0f;
                total -= rate * width[u];
                upto[u] = total;
            }
            float before = total;
#pragma unroll
            for (int offset = 1; offset < warp_size; offset *= 2) {
                const float x = __shfl_up_sync(all_lanes, before, offset);
                if (lane >= offset) before += x;
            }
            before -= total;
#pragma unroll
            for (int u = 0; u < each; ++u) {
                sum[h * span + lane * each + u] = before + upto[u];
                step[h * span + lane * each + u] = width[u];
            }
        }
    }
    // e and f of the formulas.
    __device__ float from_before(int h, int i) const { return first[i] < 0 ? power(sum[h * span + i]) : 0.0f; }
    __device__ float to_behind(int h, int i) const {
        return i >= first[span - 1] ? power(sum[h * span + span - 1] - sum[h * span + i]) : 0.0f;
    }
};

// The 16 positions of a warp, and of the one `warps` behind it. Work below the diagonal goes with the position forward,
// or backward: the two warps of a scheduler take 16 each from either end.
__device__ inline int rows_of_warp() {
    const int warp = static_cast<int>(threadIdx.x) / warp_size % warps;
    return warp < warps / 2 ? warp : warps + warps / 2 - 1 - warp;
}

// Pairs of warps share 16 positions: each makes the scores, or their gradients, of every other strip of 16 for both of
// them, and has half of the columns of the results.
inline constexpr int pairs = warps, all_threads = 2 * threads, strips = span / 16, wide = span / 16;
// Left operands of products that the warps of a pair hand to each other, of all strips that a pair has.
inline constexpr int operand_bytes = warp_size * 16, all_strips = strips * (strips + 1) / 2;

__device__ inline void meet(int pair) {
    asm volatile("bar.sync %0, %1;" ::"r"(pair + 1), "n"(2 * warp_size) : "memory");
}
__device__ inline void put_operand(unsigned at, const unsigned (&a)[4]) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])
                 : "memory");
}
__device__ inline void take_operand(unsigned at, unsigned (&a)[4]) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at));
}

// Which piece of eight columns the i-th of a side's is: sides have whole pairs of them, and one each of a last pair.
template <int pieces>
__device__ int piece_of(int side, int i) {
    constexpr int even = pieces / 2 * 2;
    return i < even ? side * even + i : 2 * even + side;
}
// c += a b, where b is rows 16 `block` on of a tile, a side's columns.
template <class Values, int pieces>
__device__ void multiply_pieces(float (&c)[pieces][4], const unsigned (&a)[4], unsigned tile, int side, int block) {
    const int lane = static_cast<int>(threadIdx.x) % warp_size;
#pragma unroll
    for (int i = 0; i < pieces; i += 2) {
        const bool two = i + 1 < pieces;
        unsigned b[4];
        ptx::read_matrices_transposed(
            b, Values::at(tile, block * 16 + lane % 16, piece_of<pieces>(side, i) + (two ? lane / 16 : 0)));
        ptx::multiply_16x8(c[i], a, b[0], b[1]);
        if (two) ptx::multiply_16x8(c[i + 1], a, b[2], b[3]);
    }
}

// Of what a thread holds of its pair's strips that at run time has this number.
__device__ inline float of_strip(const float (&raw)[strips / 2][2][4], int strip, int part, int i) {
    const float lower = strip % 2 == 0 ? raw[0][part][i] : raw[1][part][i],
                upper = strip % 2 == 0 ? raw[2][part][i] : raw[3][part][i];
    return strip < 2 ? lower : upper;
}

// What chunks leave in states, and states passed on; with dout of gradients, too.
void run_tensor_states(const TensorScan& scan, bool grad, cudaStream_t stream);

// Calls with the sizes that a shape's states are filled up to.
template <class Call>
void with_columns(int value_dim, const Call& call) {
    if (value_dim <= 64) return call.template operator()<64>();
    if (value_dim <= 80) return call.template operator()<80>();
    call.template operator()<128>();
}

} // namespace moe::cuda::ssd
