// The behaviour of a plan's software as named capabilities, which lowering, memory and cost ask for: the one place that
// compares stack names.
//
// A Stack (planner/stack) says what a generation offers and how fast it is. These traits follow from the name alone, so
// that a plan.json is lowered the same wherever it is read.
#pragma once

#include "planner/plan/plan.hpp"

#include <string_view>

namespace moe::plan {

// The software that a stack is a version of. Every published stack but PyTorch's own and one paper's is Megatron Core
// with Transformer Engine.
enum class StackEngine : std::uint8_t { own, megatron, other };

struct StackTraits {
    StackEngine engine = StackEngine::other;

    // Lowering.
    // A tensor in fp8-blockwise has one quantized form, see Plan::blocks_by_rows().
    bool quantizes_by_rows = false;
    // Precisions without products of their own are rounded to, see Plan::computed_in().
    bool emulates_precisions = false;
    // The first product that writes a weight's gradient in a step sets it; otherwise whole buckets are zeroed first.
    bool sets_first_gradients = false;
    // FSDP: whole gradients are zeroed where no product sets them, and what has been reduced is added to the shard, by
    // ops of their own; otherwise both belong to the reduction, which is only priced.
    bool adds_to_shards = false;
    // gradients = bf16: a rank sums its gradients in FP32 and a BF16 copy of them is reduced; otherwise they are summed
    // in BF16 as well.
    bool reduces_bf16_copy = false;
    // Ranks with copies of the embedding table add up the optimizer's shards of its gradient; otherwise whole
    // gradients.
    bool adds_up_shards_of_tied_table = false;
    // Chunks of one rank that hold the same weight share it; otherwise only those of a V-shaped schedule do.
    bool shares_weights_of_chunks = false;
    // The final norm lies on the stage of MTP where that is before the loss; otherwise it stays with the LM head.
    bool final_norm_with_mtp = false;
    // Each rank's rows of the vocabulary are a multiple of this, beyond the padding that the model asks for: products
    // of rows that are not whole 16 bytes take three to eight times as long (simulator/cost/alignment.hpp).
    int vocab_alignment = 1;
    // The forward of the loss writes the logits' gradient in their place, unless TP cuts the vocabulary.
    bool fuses_cross_entropy = false;
    // Buffers of routed rows hold the worst case where Plan::capacity is not set; otherwise the rows that are expected.
    bool plans_worst_case_rows = false;
    // The tokens of every expert are summed up on the device in every step, also where no loss or bias needs them.
    bool counts_load = false;
    // Routed rows beyond Plan::capacity are counted, and the step is run again with more room (overflow_retry.hpp).
    bool retries_overflow = false;
    // TP may be above the number of key heads, each of which then lies on several ranks (plan::axis::key_replicas).
    // Of Megatron Core's releases a rule says which.
    bool replicates_key_heads = false;
    // Dispatcher hybridep moves tokens over memory that peers share, by ops of its own; otherwise it is only priced.
    bool peer_memory_dispatch = false;
    // Offload takes tensors of every size, and copies of routed rows move all planned rows.
    bool offloads_planned_rows = false;
    // A norm's output is kept or recomputed with the product that reads it (TransformerEngine's LayerNormLinear).
    bool keeps_norm_with_product = false;
    // Mamba-2's layers are one op from the convolution to the gated norm (mamba_ssm's kernels); otherwise this
    // engine's.
    bool scans_in_one_op = false;
    // Recomputation of other modules keeps the output of attention's core.
    bool recompute_keeps_core = false;

    // Memory.
    // Programs run in one planned arena and in the order that they state; otherwise an allocator gives memory as it
    // goes.
    bool runs_in_arena = false;
    // This project's engine joins the devices: its communicators, slots and boxes are counted one by one.
    bool joins_devices = false;
    // Attention on GPUs takes the scratch memory that this project's kernels ask for.
    bool takes_attention_scratch = false;
    // The first copy between host and device takes memory of its own on a GPU.
    bool counts_first_copy = false;
    // The libraries behind the dispatchers (HybridEP) hold buffers of their own.
    bool holds_dispatcher_buffers = false;
    // The buffers of DeepEP are sized as Megatron Core asks for them.
    bool holds_deep_ep_buffers = false;
    // The optimizer copies to FP32 what it reads in BF16, see Plan::optimizer_copy_bytes().
    bool optimizer_copies = false;

    // Cost. Cost: computing loses measured shares of its rate to communication beside it; otherwise StackCosts states a
    // share.
    bool measures_contention = false;
    // Products of experts leave multiprocessors to messages and tokens beside them, and take longer for it.
    bool reserves_multiprocessors = false;
};

// The traits of a stack, by its name. Features behind the name ("bridge-26.08,no-fused_router") leave a published stack
// what it is; only the bare name is the engine's own stack.
const StackTraits& stack_traits(std::string_view stack);
inline const StackTraits& stack_traits(const Plan& plan) { return stack_traits(plan.stack); }

} // namespace moe::plan
