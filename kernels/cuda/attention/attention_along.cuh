// What a gradient of attention needs of each query besides its log-sum-exp: dout . o, of which that of sinks is made.
#pragma once

#include "kernels/cuda/attention/attention.cuh"

namespace moe::cuda::tensor_attention {

// along[(h - first_head) * rows + row] = dout . o, a warp for each.
__global__ void along_kernel(AttentionShape s, Src dout, Src o, int first_head, int heads, float* along) {
    const std::int64_t rows = s.seq_q * s.batch, width = std::int64_t{s.heads} * s.v_dim;
    const std::int64_t step = std::int64_t{gridDim.x} * (blockDim.x / warp_size);
    const int lane = static_cast<int>(threadIdx.x % warp_size);
    for (std::int64_t i = blockIdx.x * (blockDim.x / warp_size) + threadIdx.x / warp_size; i < heads * rows;
         i += step) {
        const std::int64_t at = i % rows * width + (first_head + i / rows) * s.v_dim;
        float sum = 0.0f;
        for (int c = lane; c < s.v_dim; c += warp_size) sum += load(dout, at + c) * load(o, at + c);
        sum = warp_sum(sum);
        if (lane == 0) along[i] = sum;
    }
}

// dsinks[h] -= the sum over queries of exp(sink - lse) along, a block for each head.
__global__ void sink_kernel(AttentionShape s, const float* lse, const float* along, int first_head, Src sinks,
                            float* dsinks) {
    const int h = first_head + static_cast<int>(blockIdx.x);
    const std::int64_t rows = s.seq_q * s.batch;
    const float sink = load(sinks, h);
    float sum = 0.0f;
    for (std::int64_t row = threadIdx.x; row < rows; row += blockDim.x)
        sum += expf(sink - lse[h * rows + row]) * along[blockIdx.x * rows + row];
    sum = block_sum(sum);
    if (threadIdx.x == 0) dsinks[h] -= sum;
}

} // namespace moe::cuda::tensor_attention
