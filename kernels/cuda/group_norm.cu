// The gated norm of Mamba-2: a block for each group of a row, whose columns stay in registers.
//
// Floors: o and z in and y out; dy, o and z in and do and dz out. Both are bound by memory.
#include "kernels/cuda/group_norm.hpp"

#include "kernels/cuda/columns.cuh"
#include "kernels/cuda/scratch.hpp"

namespace moe::cuda {
namespace {

constexpr int most = 16; // columns of a group for each thread of a block of 256 or, with wider groups, 512
constexpr std::int64_t narrow = 256 * most, widest = 512 * most;

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

// The shape as kernels read it; strides of rows in elements.
struct Groups {
    std::int64_t rows, values, projected, gate, weight; // gate: the column of p where z begins; weight: the first of w
    int columns, count;
    float eps;

    __host__ explicit Groups(const StateShape& s)
        : rows(s.rows),
          values(s.values()),
          projected(s.projected()),
          gate(s.convolved()),
          weight(s.part * s.values()),
          columns(static_cast<int>(s.norm_columns())),
          count(s.key_heads),
          eps(static_cast<float>(s.eps)) {}
};

// What a thread holds of a group: o, z and o * silu(z).
struct Held {
    float x[most], z[most], gated[most];
    float inverse; // of the root mean square
};

template <int threads>
__device__ Held read_group(const Groups& s, Src o, Src p, std::int64_t row, std::int64_t first) {
    Held held;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < most; ++i) {
        const int c = static_cast<int>(threadIdx.x) + i * threads;
        const bool in = c < s.columns;
        held.x[i] = in ? load(o, row * s.values + first + c) : 0.0f;
        held.z[i] = in ? load(p, row * s.projected + s.gate + first + c) : 0.0f;
        held.gated[i] = held.x[i] * held.z[i] * sigmoid(held.z[i]);
        squares += held.gated[i] * held.gated[i];
    }
    held.inverse = rsqrtf(block_sum(squares) / static_cast<float>(s.columns) + s.eps);
    return held;
}

template <int threads>
__global__ void __launch_bounds__(threads) group_norm_kernel(Groups s, Src o, Src p, Src w, Dst y) {
    const std::int64_t first = std::int64_t{blockIdx.y} * s.columns;
    for (std::int64_t row = blockIdx.x; row < s.rows; row += gridDim.x) {
        const Held held = read_group<threads>(s, o, p, row, first);
#pragma unroll
        for (int i = 0; i < most; ++i) {
            const int c = static_cast<int>(threadIdx.x) + i * threads;
            if (c < s.columns)
                store(y, row * s.values + first + c, held.gated[i] * held.inverse * load(w, s.weight + first + c));
        }
    }
}

// A block takes every so many rows; partial[block][column of a row]: its sum for dw.
template <int threads>
__global__ void __launch_bounds__(threads)
    group_norm_grad_kernel(Groups s, Src dy, Src o, Src p, Src w, Dst dout, Dst dp, float* partial) {
    const std::int64_t first = std::int64_t{blockIdx.y} * s.columns;
    float sum[most] = {};
    for (std::int64_t row = blockIdx.x; row < s.rows; row += gridDim.x) {
        const Held held = read_group<threads>(s, o, p, row, first);
        float grad[most], along = 0.0f;
#pragma unroll
        for (int i = 0; i < most; ++i) {
            const int c = static_cast<int>(threadIdx.x) + i * threads;
            const bool in = c < s.columns;
            const float g = in ? load(dy, row * s.values + first + c) : 0.0f, unit = held.gated[i] * held.inverse;
            sum[i] += g * unit;
            grad[i] = in ? g * load(w, s.weight + first + c) : 0.0f;
            along += grad[i] * unit;
        }
        along = block_sum(along) / static_cast<float>(s.columns);
#pragma unroll
        for (int i = 0; i < most; ++i) {
            const int c = static_cast<int>(threadIdx.x) + i * threads;
            if (c >= s.columns) continue;
            const float d = held.inverse * (grad[i] - held.gated[i] * held.inverse * along);
            const float z = held.z[i], open = sigmoid(z);
            store(dout, row * s.values + first + c, d * z * open);
            store(dp, row * s.projected + s.gate + first + c, d * held.x[i] * open * (1.0f + z * (1.0f - open)));
        }
    }
#pragma unroll
    for (int i = 0; i < most; ++i) {
        const int c = static_cast<int>(threadIdx.x) + i * threads;
        if (c < s.columns) partial[blockIdx.x * s.values + first + c] = sum[i];
    }
}

Groups checked(const StateShape& shape) {
    const Groups s(shape);
    require(s.columns <= widest, "columns of a group of a gated norm", s.columns, widest);
    require(s.values <= scratch_floats, "columns of a gated norm", s.values, scratch_floats);
    return s;
}

} // namespace

void group_norm(const StateShape& shape, Src o, Src p, Src w, Dst y, cudaStream_t stream) {
    const Groups s = checked(shape);
    const dim3 grid(blocks_for(s.rows, 1, 65535), static_cast<unsigned>(s.count));
    if (s.columns <= narrow) {
        group_norm_kernel<256><<<grid, 256, 0, stream>>>(s, o, p, w, y);
    } else {
        group_norm_kernel<512><<<grid, 512, 0, stream>>>(s, o, p, w, y);
    }
    CUDA_CHECK(cudaGetLastError());
}

void group_norm_grad(const StateShape& shape, Src dy, Src o, Src p, Src w, Dst dout, Dst dp, float* dw, void* stream) {
    const Groups s = checked(shape);
    const std::int64_t fit = scratch_floats / s.values;
    const unsigned blocks = blocks_for(s.rows, 8, fit < 512 ? fit : 512);
    float* const partial = scratch_of(stream_of(stream));
    const dim3 grid(blocks, static_cast<unsigned>(s.count));
    if (s.columns <= narrow) {
        group_norm_grad_kernel<256><<<grid, 256, 0, stream_of(stream)>>>(s, dy, o, p, w, dout, dp, partial);
    } else {
        group_norm_grad_kernel<512><<<grid, 512, 0, stream_of(stream)>>>(s, dy, o, p, w, dout, dp, partial);
    }
    CUDA_CHECK(cudaGetLastError());
    launch_sum_columns(PartialTerm{partial, s.values}, dw + s.weight, blocks, s.values, stream);
}

} // namespace moe::cuda
