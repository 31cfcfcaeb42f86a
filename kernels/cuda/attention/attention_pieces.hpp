// The cut of a backward of attention into calls of cuDNN, and the sums over those that share keys.
#pragma once

#include "kernels/cuda/attention/attention_graphs.hpp"
#include "kernels/kernels.hpp"

#include <cuda_runtime_api.h>

#include <vector>

namespace moe::cuda {

// Ranges of one call: from, count.
struct AttentionPiece {
    std::int64_t sequence = 0, sequences = 0;
    std::int64_t key_head = 0, key_heads = 0, head = 0, heads = 0;
    std::int64_t query = 0, queries = 0, key = 0, keys = 0;
    // Pieces one after another may share key heads: their key gradients are summed in FP32.
    bool shared = false, first = true, last = true;
};

// The pieces in the order in which they run; empty where a piece would take more scratch than it should.
std::vector<AttentionPiece> attention_pieces(const AttentionPlanShape& whole);
AttentionPlanShape shape_of(const AttentionPlanShape& whole, const AttentionPiece& piece);

// FP32 elements of a piece's sums: [sequences, key heads, seq_k, width].
inline std::int64_t key_sums(const AttentionPlanShape& whole, const AttentionPiece& p, std::int64_t width) {
    return p.shared ? p.sequences * p.key_heads * whole.seq_k * width : 0;
}
// sums = 0 for the first piece, += part[sequences, key heads, keys, width] (BF16), and after the last piece
// y[row, head] = sums; rows of y are `stride` apart and those of a sequence whole.interleaved * stride.
void sum_key_grads(const AttentionPlanShape& whole, const AttentionPiece& piece, const void* part, std::int64_t width,
                   float* sums, Dst y, std::int64_t stride, cudaStream_t stream);

} // namespace moe::cuda
