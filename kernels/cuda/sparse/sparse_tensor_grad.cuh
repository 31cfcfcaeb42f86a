// What the gradients of attention over picked keys share on tensor cores: the stream of 32 rows past 64 that stay.
//
// 64 heads of a row stay and the keys of its list stream, or the keys at 64 positions stay and the heads of every row
// that has one of them stream. One warpgroup makes the weights P from the scores, the other dS = P (dP - sum of do o)
// from the products with the value, and both add up their columns of dS K, or of dS^T Q + P^T dO.
#pragma once

#include "kernels/cuda/sparse/sparse_tensor.cuh"

namespace moe::cuda::sparse_tensor {

inline constexpr int stream_rows = 32, batch_rows = 128;

struct GradOperands {
    LatentShape s;
    const __nv_bfloat16 *dout, *q, *k;
    const float* lse;
    const std::int32_t* keys;
    __nv_bfloat16 *dq, *dk;

    // The sum of do o of a head waits where the first columns of its dq will be.
    __device__ float* along(std::int64_t head) const { return reinterpret_cast<float*>(dq + head * wide); }
};

// Shared memory: what stays, the stages, [P | dS] of 32 columns each, P on its way to the other warpgroup, logs of sums
// and sums of do o of a stage's heads, the rows of a batch that have keys of the tile.
template <int stay_bytes, int stage_bytes>
struct LayoutOf {
    static constexpr int weights_at = stay_bytes + stages * stage_bytes, passed_at = weights_at + tile_bytes(tile, 64),
                         numbers_at = passed_at + 4 * 128 * 8, masks_at = numbers_at + stages * 2 * stream_rows * 4,
                         rows_at = masks_at + batch_rows * 8, counts_at = rows_at + batch_rows * 4,
                         barriers_at = counts_at + 32, shared_bytes = alignment + barriers_at + 64;
    static constexpr int sum_stride = wide + 8; // floats of a row of the sums that a cluster adds
    static_assert(tile * sum_stride * 4 <= weights_at && shared_bytes <= 232448);
    unsigned start;

    __device__ explicit LayoutOf(const void* memory)
        : start((ptx::shared_address(memory) + alignment - 1) / alignment * alignment) {}
    __device__ unsigned stage(int i) const { return start + stay_bytes + i * stage_bytes; }
    __device__ unsigned weights() const { return start + weights_at; }
    __device__ unsigned passed(int i) const {
        return start + passed_at + (i * 128 + static_cast<int>(threadIdx.x) % 128) * 4;
    }
    __device__ unsigned number(int stage, int which, int head) const {
        return start + numbers_at + ((stage * 2 + which) * stream_rows + head) * 4;
    }
    __device__ unsigned mask(int i) const { return start + masks_at + i * 8; }
    __device__ unsigned row(int i) const { return start + rows_at + i * 4; }
    __device__ unsigned count(int i) const { return start + counts_at + i * 4; }
    __device__ unsigned stay_full() const { return start + barriers_at; }
    __device__ unsigned full(int stage) const { return start + barriers_at + 8 * (1 + stage); }
    __device__ unsigned empty(int stage) const { return start + barriers_at + 8 * (1 + stages + stage); }
    __device__ unsigned sum(int row, int column) const { return start + (row * sum_stride + column) * 4; }

    __device__ void begin() const {
        if (threadIdx.x == 0) {
            ptx::init_barrier(stay_full(), 128);
            for (int stage = 0; stage < stages; ++stage) {
                ptx::init_barrier(full(stage), loaders);
                ptx::init_barrier(empty(stage), 4 * consumers);
            }
            ptx::fence_barrier_init();
        }
        __syncthreads();
    }
};

inline constexpr int wide_bytes = tile_bytes(tile, wide), value_bytes = tile_bytes(tile, value_wide),
                     wide_stage = tile_bytes(stream_rows, wide), value_stage = tile_bytes(stream_rows, value_wide);
using QueryLayout = LayoutOf<wide_bytes + value_bytes, wide_stage>;
using KeyLayout = LayoutOf<wide_bytes, wide_stage + value_stage>;

enum Meeting : int { weights_passed = 1, weights_read, weights_there, rows_counted };

// The sums of a warpgroup's columns: the first 256 or, of the second, the 320 others.
template <bool second>
struct Sums {
    static constexpr int tail_columns = second ? wide - 512 : 0, first_box = second ? 4 : 0;
    float out[128], tail[second ? tail_columns / 2 : 1];

    __device__ Sums() {
#pragma unroll
        for (float& x : out) x = 0.0f;
#pragma unroll
        for (float& x : tail) x = 0.0f;
    }
    // Adds slices of the weights, from `slice` on, times the 32 rows of a stage's tile; under way when this returns.
    __device__ void add(unsigned weights, int slice, unsigned rows, bool with_tail) {
#pragma unroll
        for (int i = 0; i < stream_rows / 16; ++i) {
            const std::uint64_t left = along_columns<tile>(weights, slice + i);
            ptx::multiply<false, true>(out, left, along_rows<stream_rows>(rows + first_box * box_bytes(stream_rows), i),
                                       1);
            if constexpr (second)
                if (with_tail)
                    ptx::multiply<false, true>(tail, left,
                                               along_rows<stream_rows>(rows + 8 * box_bytes(stream_rows), i), 1);
        }
    }
    __device__ void settle() {
        ptx::settle(out);
        if constexpr (second) ptx::settle(tail);
    }
    // Calls with a row and two columns of the sums.
    template <class Write>
    __device__ void each(Write write) const {
        const Place place;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int j = 0; j < 32; ++j)
                write(place.row + 8 * h, first_box * 64 + 8 * j + place.column,
                      float2{out[4 * j + 2 * h], out[4 * j + 2 * h + 1]});
            if constexpr (second) {
#pragma unroll
                for (int j = 0; j < tail_columns / 8; ++j)
                    write(place.row + 8 * h, 512 + 8 * j + place.column,
                          float2{tail[4 * j + 2 * h], tail[4 * j + 2 * h + 1]});
            }
        }
    }
};

// Products of 64 rows and the 32 of a stage: scores over all columns, or those with values; under way.
template <bool values>
__device__ void begin_products(float (&d)[stream_rows / 2], unsigned stay, unsigned stream) {
    ptx::fence_products();
#pragma unroll
    for (int slice = 0; slice < (values ? value_wide : wide) / 16; ++slice)
        ptx::multiply<false, false>(d, along_columns<tile>(stay, slice), along_columns<stream_rows>(stream, slice),
                                    slice);
    ptx::commit_products();
}

// What a warpgroup makes of its products: the first passes P on, the second turns it into dS. `log_of` and `along_of`
// give the log of a sum (to the base 2) and the sum of do o for element i; `real` whether it has a weight at all.
template <bool second, class L, class Log, class Along, class Real>
__device__ void soften(const L& at, const float (&products)[stream_rows / 2], float scale, const Log& log_of,
                       const Along& along_of, const Real& real, unsigned (&words)[stream_rows / 4]) {
    if constexpr (second) ptx::await_warpgroup(weights_passed);
#pragma unroll
    for (int i = 0; i < stream_rows / 4; ++i) { // element 2 i and the next: row h = i % 2
        if constexpr (second) {
            const float2 p = unpack_two(read_word(at.passed(i)));
            words[i] = pack_two(p.x * (products[2 * i] - along_of(2 * i)) * scale,
                                p.y * (products[2 * i + 1] - along_of(2 * i + 1)) * scale);
        } else {
            const float by = scale * log2_e;
            const float first = real(2 * i) ? exp2f(fmaf(products[2 * i], by, -log_of(2 * i))) : 0.0f;
            const float next = real(2 * i + 1) ? exp2f(fmaf(products[2 * i + 1], by, -log_of(2 * i + 1))) : 0.0f;
            words[i] = pack_two(first, next);
            write_two(at.passed(i), words[i]);
        }
    }
    if constexpr (!second) ptx::release_warpgroup(weights_passed);
}

// Half of [P | dS].
template <class L>
__device__ void write_half(const L& at, int half, const unsigned (&words)[stream_rows / 4]) {
    const Place place;
#pragma unroll
    for (int i = 0; i < stream_rows / 4; ++i)
        write_two(swizzled(at.weights(), place.row + 8 * (i % 2), half * stream_rows + i / 2 * 8 + place.column),
                  words[i]);
    ptx::fence_async_proxy();
}

// Goes over `items` of the stream, of which `used` came before. `begin`(products, stage) multiplies, `make`(item,
// stage, products, words) softens, `add`(stage) adds. `both`: P is an operand of the sums too.
template <bool second, bool both, class L, class Begin, class Make, class Add>
__device__ void go_over(const L& at, Sums<second>& sums, int used, int items, const Begin& begin, const Make& make,
                        const Add& add) {
    const bool speaks = threadIdx.x % warp_size == 0;
    float products[stream_rows / 2];
    unsigned words[stream_rows / 4];
    for (int item = 0; item < items; ++item) {
        const int use = used + item, stage = stage_of(use);
        ptx::wait(at.full(stage), parity_of(use));
        begin(products, stage);
        ptx::wait_products<0>();
        ptx::settle(products);
        if (both && second) ptx::release_warpgroup(weights_read); // of the item before
        make(item, stage, products, words);
        if (both && !second) ptx::await_warpgroup(weights_read);
        if (second || both) write_half(at, second ? 1 : 0, words);
        ptx::await_warpgroup(weights_there);
        ptx::fence_products();
        add(stage);
        ptx::commit_products();
        ptx::wait_products<0>();
        sums.settle();
        if (speaks) ptx::arrive(at.empty(stage));
    }
}

// dk of the operands, whose sums of do o lie where along() says.
void add_up_keys(const GradOperands& in, cudaStream_t stream);

} // namespace moe::cuda::sparse_tensor
