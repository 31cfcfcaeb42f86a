// Element by element over flat vectors: packs that are independent of each other, several in flight per thread.
#pragma once

#include "kernels/cuda/vector.cuh"

namespace moe::cuda {

inline constexpr int flat_threads = 256;
inline constexpr int flat_packs = 4; // packs per thread, all read before the first is written

// op.read<W>(i) holds what elements [i, i + W) need, op.write<W>(i, held) makes their results. A thread reads what it
// alone writes, so results may replace operands. The elements behind the last whole pack go one by one.
template <int W, class Op>
__global__ void __launch_bounds__(flat_threads) flat_kernel(Op op, std::int64_t n) {
    const std::int64_t packs = n / W, first = std::int64_t{blockIdx.x} * flat_threads * flat_packs + threadIdx.x;
    decltype(op.template read<W>(0)) held[flat_packs];
#pragma unroll
    for (int j = 0; j < flat_packs; ++j) {
        if (first + j * flat_threads < packs) held[j] = op.template read<W>((first + j * flat_threads) * W);
    }
#pragma unroll
    for (int j = 0; j < flat_packs; ++j) {
        if (first + j * flat_threads < packs) op.template write<W>((first + j * flat_threads) * W, held[j]);
    }
    if constexpr (W > 1) {
        const std::int64_t i = packs * W + threadIdx.x;
        if (blockIdx.x == 0 && i < n) op.template write<1>(i, op.template read<1>(i));
    }
}

template <int W, class Op>
void launch_flat(const Op& op, std::int64_t n, void* stream) {
    if (n <= 0) return;
    const unsigned blocks = blocks_for(ceil_div(n, std::int64_t{W}), flat_threads * flat_packs);
    flat_kernel<W><<<blocks, flat_threads, 0, stream_of(stream)>>>(op, n);
    CUDA_CHECK(cudaGetLastError());
}

} // namespace moe::cuda
