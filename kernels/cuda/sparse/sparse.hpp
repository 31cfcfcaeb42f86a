// The parts of sparse attention's kernels, and what a block holds of an indexer's query.
#pragma once

#include "kernels/cuda/check.hpp"
#include "kernels/kernels.hpp"

namespace moe::cuda {

void add_sparse_pick(Kernels& table);
void add_sparse_attention(Kernels& table);
void add_sparse_loss(Kernels& table);
// After those: what Hopper's tensor cores take of them.
void add_tensor_sparse(Kernels& table);
void add_tensor_sparse_grad(Kernels& table);
void add_tensor_sparse_loss(Kernels& table);

// shares[rows, width]: the sum over heads of what their softmax gives each key of a row. For shapes and operands that
// the tensor cores take.
void find_shares(const IndexLossShape& s, Src q, Src k, const std::int32_t* keys, float* shares, cudaStream_t stream);

// Adds factor times the queries' parts of an indexer's loss, in an order that is always the same.
void add_losses(const float* by_query, std::int64_t rows, double factor, float* loss, cudaStream_t stream);

// Bytes of an indexer's query of all heads with their weights, which blocks hold in shared memory.
inline std::size_t index_bytes(const IndexShape& s) {
    constexpr int most = 16384; // 64 heads of 256 columns
    require(s.heads * (s.dim + 1) <= most, "the number of columns of an indexer's query", s.heads * s.dim, most);
    return static_cast<std::size_t>(s.heads * (s.dim + 1)) * sizeof(float);
}

} // namespace moe::cuda
