// The parts that both directions of attention share: rows of heads in memory, the mask, blocks in shared memory.
//
// The plain kernels: FP32 multiply-adds out of shared memory for operands of any type, heads up to 256 wide (wider
// ones: attention_wide.hpp). The
// running softmax and the recomputation of probabilities from the saved log-sum-exp follow FlashAttention (Dao et al.,
// arXiv:2205.14135, algorithms 1 and 4).
#pragma once

#include "kernels/cuda/device.cuh"

namespace moe::cuda {

// 256 threads stand 16 x 16 over a block: rows in fours, columns in strides of 16.
inline constexpr int attention_threads = 256, grid_side = 16, rows_per_thread = 4;
inline constexpr int long_block = grid_side * rows_per_thread; // queries or keys that keep their sums in registers
inline constexpr int max_head_dim = 256;

// +dsinks of attention_grad, from dout, o and lse alone.
void attention_sink_grad(const AttentionShape& shape, Src dout, Src o, const float* lse, Src sinks, float* dsinks,
                         void* stream);

// The rows of one sequence and head: row i starts at element start + i * step.
struct HeadRows {
    std::int64_t start, step;
};

struct AttentionSizes {
    AttentionShape s;
    std::int64_t q_stride, k_stride, v_stride;

    explicit AttentionSizes(const AttentionShape& shape)
        : s(shape),
          q_stride(s.q_stride != 0 ? s.q_stride : std::int64_t{s.heads} * s.qk_dim),
          k_stride(s.k_stride != 0 ? s.k_stride : std::int64_t{s.kv_heads} * s.qk_dim),
          v_stride(s.v_stride != 0 ? s.v_stride : std::int64_t{s.kv_heads} * s.v_dim) {}

    __device__ HeadRows q(std::int64_t b, std::int64_t h) const {
        return {b * q_stride + s.q_offset + h * s.qk_dim, s.batch * q_stride};
    }
    __device__ HeadRows k(std::int64_t b, std::int64_t h) const {
        return {b * k_stride + s.k_offset + h * s.qk_dim, s.batch * k_stride};
    }
    __device__ HeadRows v(std::int64_t b, std::int64_t h) const {
        return {b * v_stride + s.v_offset + h * s.v_dim, s.batch * v_stride};
    }
    __device__ HeadRows o(std::int64_t b, std::int64_t h) const {
        const std::int64_t stride = std::int64_t{s.heads} * s.v_dim;
        return {b * stride + h * s.v_dim, s.batch * stride};
    }
    __device__ std::int64_t lse(std::int64_t b, std::int64_t h, std::int64_t i) const {
        return (h * s.seq_q + i) * s.batch + b;
    }
    // Keys [first, last) that query i of sequence b sees; neither falls as i grows.
    __device__ std::int64_t last(std::int64_t i) const { return s.causal ? keys_before(i, 1) : s.seq_k; }
    __device__ std::int64_t first(std::int64_t b, std::int64_t i) const {
        const std::int64_t seen = s.window > 0 ? keys_before(i, 1 - s.window) : 0;
        if (s.document_start == nullptr) return seen;
        const std::int64_t document = keys_below(s.document_start[i * s.batch + b]);
        return document > seen ? document : seen;
    }
    __device__ bool sees(std::int64_t b, std::int64_t i, std::int64_t j) const {
        return i < s.seq_q && j < s.seq_k && j < last(i) && j >= first(b, i);
    }

private:
    // Keys at positions below query i's plus `shift`.
    __device__ std::int64_t keys_before(std::int64_t i, std::int64_t shift) const {
        if (!s.spread) return keys_below(i + s.seq_k - s.seq_q + shift);
        const std::int64_t run = s.seq_q / 2;
        return keys_below((i < run ? s.q_start[0] + i : s.q_start[1] + i - run) + shift);
    }
    __device__ std::int64_t keys_below(std::int64_t end) const {
        if (!s.spread) return clamp(end, s.seq_k);
        return clamp(end - s.k_start[0], s.seq_k / 2) + clamp(end - s.k_start[1], s.seq_k / 2);
    }
    __device__ static std::int64_t clamp(std::int64_t j, std::int64_t most) { return j < 0 ? 0 : j < most ? j : most; }
};

// Reads `rows` rows from `row` on into shared memory, zero beyond the limit and beyond the head's width: what the sums
// meet there must be a number. One element of padding keeps the rows of a column in different banks.
template <int width>
struct Block {
    static constexpr int pitch = width + 1;
    float* data;

    __device__ float* operator[](int row) const { return data + row * pitch; }
    __device__ void fill(Src x, HeadRows head, std::int64_t row, int rows, std::int64_t limit, int dim,
                         float scale) const {
        for (int i = static_cast<int>(threadIdx.x); i < rows * width; i += attention_threads) {
            const int r = i / width, c = i % width;
            const bool inside = row + r < limit && c < dim;
            data[r * pitch + c] = inside ? load(x, head.start + (row + r) * head.step + c) * scale : 0.0f;
        }
    }
};

// sum[i][j] = a[row + i] . b[col + 16 j] over dim elements.
template <int columns, int width>
__device__ void dot_rows(const Block<width>& a, const Block<width>& b, int row, int col, int dim,
                         float (&sum)[rows_per_thread][columns]) {
#pragma unroll
    for (int i = 0; i < rows_per_thread; ++i) {
#pragma unroll
        for (int j = 0; j < columns; ++j) sum[i][j] = 0.0f;
    }
#pragma unroll 4
    for (int l = 0; l < dim; ++l) {
        float right[columns];
#pragma unroll
        for (int j = 0; j < columns; ++j) right[j] = b[col + j * grid_side][l];
#pragma unroll
        for (int i = 0; i < rows_per_thread; ++i) {
            const float left = a[row + i][l];
#pragma unroll
            for (int j = 0; j < columns; ++j) sum[i][j] += left * right[j];
        }
    }
}

// sum[i][c] += weights[row + i][0, n) times column col + 16 c of b's n rows.
template <int columns, int inner, int width>
__device__ void add_rows(const Block<inner>& weights, const Block<width>& b, int row, int col, int n,
                         float (&sum)[rows_per_thread][columns]) {
#pragma unroll 2
    for (int l = 0; l < n; ++l) {
        float left[rows_per_thread];
#pragma unroll
        for (int i = 0; i < rows_per_thread; ++i) left[i] = weights[row + i][l];
#pragma unroll
        for (int c = 0; c < columns; ++c) {
            const float right = b[l][col + c * grid_side];
#pragma unroll
            for (int i = 0; i < rows_per_thread; ++i) sum[i][c] += left[i] * right;
        }
    }
}

// Writes the sums as rows of a head, or adds them to what these rows hold.
template <int columns>
__device__ void write_rows(Dst y, HeadRows head, std::int64_t row, std::int64_t limit, int col, int dim, float scale,
                           const float (&sum)[rows_per_thread][columns], bool add = false) {
#pragma unroll
    for (int i = 0; i < rows_per_thread; ++i) {
#pragma unroll
        for (int c = 0; c < columns; ++c) {
            if (row + i < limit && col + c * grid_side < dim) {
                const std::int64_t at = head.start + (row + i) * head.step + col + c * grid_side;
                store(y, at, sum[i][c] * scale + (add ? load(read_back(y), at) : 0.0f));
            }
        }
    }
}

// Over the 16 threads that share rows: neighbouring lanes of one half of a warp.
__device__ inline float side_sum(float value) {
    for (int offset = grid_side / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(all_lanes, value, offset);
    return value;
}
__device__ inline float side_max(float value) {
    for (int offset = grid_side / 2; offset > 0; offset /= 2) {
        value = fmaxf(value, __shfl_xor_sync(all_lanes, value, offset));
    }
    return value;
}

// Whether attention_wide.hpp has to serve.
inline bool is_wide(const AttentionShape& s) { return s.qk_dim > max_head_dim || s.v_dim > max_head_dim; }

// Calls run.operator()<qk columns, v columns>() with the narrowest pair of widths, in units of 16, that holds both.
template <class Run>
void for_head_dims(const AttentionShape& s, Run run) {
    if (s.qk_dim <= 64 && s.v_dim <= 64) {
        run.template operator()<4, 4>();
    } else if (s.qk_dim <= 128 && s.v_dim <= 128) {
        run.template operator()<8, 8>();
    } else if (s.qk_dim <= 192 && s.v_dim <= 128) {
        run.template operator()<12, 8>();
    } else {
        run.template operator()<16, 16>();
    }
}

// Launches with more than the 48 KiB of shared memory that a kernel gets unasked.
template <class... Parameters, class... Arguments>
void launch_shared(void (*kernel)(Parameters...), dim3 grid, std::size_t bytes, void* stream, Arguments... arguments) {
    CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
    kernel<<<grid, attention_threads, bytes, stream_of(stream)>>>(arguments...);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace moe::cuda
