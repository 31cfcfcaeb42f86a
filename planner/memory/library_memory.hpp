// The memory of libraries: bytes that a rank's accelerator holds beside the plan's arena and its communicators.
#pragma once

#include "planner/plan/fwd.hpp"

#include <cstdint>

namespace moe::memory {

// Bytes: the hardware's context_bytes; where this project's engine trains a plan in BF16 on a GPU, the scratch of the
// attention library, which keeps a backward's score gradients where every run shall have the same bits
// (docs/notes/kernels-attention.md), what copies of offloaded tensors take, and packed operands of block-scaled
// products (plan/block_scaling.hpp); under other stacks HybridEP's buffers, under those on Megatron Core DeepEP's as
// well.
double library_memory(const plan::Plan& plan);

// An EP group (with its ETP) that exchanges tokens by HybridEP: tokens of a rank before the exchange, their width,
// experts of a rank, NVLink domains that the group spans and its ranks in each.
struct HybridEpGroup {
    std::int64_t tokens = 0, width = 0, experts = 0, ranks = 1, domains = 1;
};

// Bytes of the buffers that HybridEP registers on a rank, outside of PyTorch's allocator and as long as the run lasts:
// room for every token of the group in BF16, as if all chose this rank, with FP32 probabilities for the experts of its
// domain; twice across domains, with what leaves and reaches them. Source: DeepEP, branch hybrid-ep,
// csrc/hybrid_ep/buffer/intranode.cu and internode.cu (allocate_dispatch_buffers, allocate_combine_buffers).
double hybrid_ep_buffers(const HybridEpGroup& group);

// Bytes of the buffers that DeepEP registers on a rank, for tokens of this width in an EP group (with its ETP) of so
// many ranks, whatever their number of tokens: chunks on their way in 20 / 2 channels over NVLink and, behind eight
// ranks, as many to and from every node; a token comes with room for 128 choices and as many scales. Source: DeepEP,
// csrc/config.hpp (get_nvl_buffer_size_hint, get_rdma_buffer_size_hint) and deep_ep/buffer.py (get_dispatch_config,
// get_combine_config), which are asked with these in Megatron-LM, megatron/core/transformer/moe/fused_a2a.py
// (get_buffer); 20: moe_deepep_num_sms.
double deep_ep_buffers(std::int64_t width, std::int64_t ranks);

// One backward of causal attention: sequences and heads of a rank, widths, length, window (0: none).
struct AttentionWork {
    std::int64_t batch = 1, heads = 1, kv_heads = 1, qk_dim = 0, v_dim = 0, seq = 0, window = 0;
    bool deterministic = false;
    int multiprocessors = 0; // of a GPU whose deterministic backwards our own kernels take (compute capability 9.0)
};

// Bytes of that scratch at most: a sum per query, gradients of each head's keys and values where heads share them, and
// FP32 gradients of the queries; or, where it is deterministic, instead of these a matrix of BF16 score gradients for
// each head of the largest piece, FP32 sums over pieces that share keys, and 0 where a piece would be so large that the
// library is not asked. Where our own kernels take a deterministic one: FP32 gradients and two numbers of each query,
// and FP32 sums of the keys at work where heads share them.
double attention_scratch(const AttentionWork& work);
// Whether they take it.
bool has_own_backward(const AttentionWork& work);

} // namespace moe::memory
