// Attention forward and backward as cuDNN operation graphs.
#pragma once

#include "kernels/cuda/attention/cudnn_graph.hpp"

#include <compare>

namespace moe::cuda {

// The shape that decides a plan: sizes and strides of BF16 operands (elements), the mask, the scale. Row i of sequence
// b and head h of q starts at b * batch_stride + h * width + i * row_stride, row_stride = (sequences interleaved) *
// batch_stride.
struct AttentionPlanShape {
    std::int64_t batch = 0, heads = 0, kv_heads = 0, seq_q = 0, seq_k = 0, qk_dim = 0, v_dim = 0;
    std::int64_t q_batch = 0, k_batch = 0, v_batch = 0, o_batch = 0; // elements from one sequence to the next
    std::int64_t interleaved = 1; // number of sequences whose rows take turns in memory: rows of one lie that far apart
    std::int64_t window = 0;
    float scale = 1.0f;
    std::int64_t dq_batch = 0; // elements from one sequence of dq to the next; 0 = as q_batch
    std::int64_t lse_head = 0; // elements of lse from one head to the next
    bool causal = true, sinks = false, grad = false, deterministic = true;
    bool dense_key_grads = false; // whether dk and dv are [batch, key heads, seq_k, width] instead of as k and v lie
    auto operator<=>(const AttentionPlanShape&) const = default;
};

// Operands of run(); lse, along and dq_sums are FP32, [batch, heads, seq_q] in the order of lse in kernels.hpp for lse,
// dense for the others.
enum AttentionOperand : std::int64_t {
    operand_q = 1,
    operand_k,
    operand_v,
    operand_o,
    operand_lse,
    operand_sinks, // FP32 sinks of the forward
    operand_dout,  // first operand that only the backward has
    operand_dq,
    operand_dk,
    operand_dv,
    operand_along,   // scratch of dout . o of each query
    operand_dq_sums, // scratch of dq in FP32, qk_dim wide, where not deterministic
};

// Describes o and lse from q, k, v, or dq, dk, dv from all of them.
void describe_attention(CudnnGraph& graph, const AttentionPlanShape& shape);
void describe_attention_grad(CudnnGraph& graph, const AttentionPlanShape& shape);

} // namespace moe::cuda
