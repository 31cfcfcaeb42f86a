// A plan: every choice for a run. plan.json is this, versioned, with its model and hardware inside.
#pragma once

#include "planner/machine/fwd.hpp"
#include "planner/machine/precision.hpp"
#include "planner/model/fwd.hpp"
#include "planner/plan/choices.hpp"
#include "planner/plan/fwd.hpp"
#include "planner/plan/lora.hpp"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace moe::plan {

// The choices by which the router is trained; everything is off by default.
//
// With P(t, e) the score of expert e divided by the sum over all experts (for softmax that sum is 1) and n(e) the
// tokens among T whose K best scores hold e, selection bias and groups left aside, a layer adds
//   aux_loss * E / (K T^2) * sum over e of n(e) * (sum over t of P(t, e))
// to the loss: averaged over micro-batches and data-parallel ranks (micro_batch) or over sequences (sequence), so that
// only the former depends on the plan. For the global batch n is that of the step before (nothing in the first step):
// the present one is not known before the last forward, and what Megatron takes instead, the micro-batches so far,
// depends on the plan. z_loss adds its coefficient times the mean over tokens of logsumexp(logits)^2.
// For sinkhorn the experts of a token are those of the top_k largest d(e) exp(logit), with d as Sinkhorn's iteration
// over the tokens that the rank's router sees leaves it (kernels/kernel_args.hpp), so that the choice depends on the
// plan; weights are the model's own, of the plain logits, and an evaluation chooses by these.
// Sources: Megatron-LM moe_utils.py; arXiv 2412.19437 section 2.1.2; z-loss arXiv 2202.08906 section 2.2.
struct RouterTraining {
    LoadBalancing load_balancing = LoadBalancing::sequence;
    double aux_loss = 0.0, z_loss = 0.0; // coefficients
    // While it trains, the router's input is multiplied by uniform noise in [1 - input_jitter, 1 + input_jitter];
    // experts read the input as it is (arXiv 2101.03961 section 2.2, Megatron-LM router.py, apply_input_jitter). The
    // noise of a number depends on the seed, the step, the layer and the place of its token in the global batch, and so
    // on no other field. 0: none.
    double input_jitter = 0.0;
    // The selection bias of an expert moves by this much per step, up where it got fewer tokens than the mean and down
    // where it got more (arXiv 2408.15664).
    double bias_update = 0.0;
    // The choice is made for the router, position by position, so that every expert gets as many tokens; weights are
    // still its own. For benchmarks.
    bool forced = false;
    // Factor over the balanced load that an expert takes of the T tokens of drop_scope, ceil(T K factor / E) tokens;
    // those beyond are dropped and only the residual carries them on. 0: none are. Not Plan::capacity, which drops
    // nothing. With whole sequences what is dropped depends on no other field; else on mbs, tp and cp.
    double expert_capacity = 0.0;
    DropPolicy drop_policy = DropPolicy::probs;
    DropScope drop_scope = DropScope::sub_sequence;
    // Every expert gets exactly expert_capacity rows of every rank, those without a token zero, so that all shapes are
    // known before the step.
    bool pad_to_capacity = false;
    bool has_loss() const { return aux_loss > 0.0 || z_loss > 0.0; }
    bool drops_in_sequences() const { return expert_capacity > 0.0 && drop_scope == DropScope::full_sequence; }
    bool counts_load() const { return has_loss() || bias_update > 0.0; }
    bool operator==(const RouterTraining&) const = default;
};

// How the indexers of sparse attention are trained. With p the distribution over keys that the heads of attention have
// together, summed over heads and divided by their number, and s = softmax(scores) of the indexer, a layer with an
// indexer adds loss * the mean over tokens of KL(p, s) to the loss. The gradient goes to the indexer alone: p, what the
// indexer reads, and the choice of keys have none. Sources: arXiv 2512.02556 section 2.1.1; Megatron-LM, dsa.py.
struct IndexerTraining {
    double loss = 1.0; // coefficient; 0: indexers are not trained
    IndexerStage stage = IndexerStage::sparse;
    bool operator==(const IndexerTraining&) const = default;
};

struct OptimizerChoice {
    Moments moments = Moments::fp32; // of AdamW
    bool narrow() const { return moments != Moments::fp32; }
    // Muon (arXiv 2502.16982) for the matrices of layers, which then keep one FP32 moment; AdamW for everything else.
    bool muon = false;
    bool operator==(const OptimizerChoice&) const = default;
};

struct Plan { // NOLINT(clang-analyzer-optin.performance.Padding): fields stand by subject.
    std::shared_ptr<const model::Model> model;
    std::shared_ptr<const machine::Hardware> hardware;
    std::string stack; // software generation; what it is taken to do: stack_traits.hpp

    // workload
    std::int64_t seq = 0; // tokens per sequence
    std::int64_t gbs = 0; // sequences per step
    // Distribution of tokens over experts: "balanced", "dirichlet:A" (A > 0), "zipf:S" (S >= 0) or the path of a
    // histogram that a run recorded.
    std::string routing = "balanced";
    RouterTraining router;
    IndexerTraining indexer;
    Documents documents = Documents::ignore;
    // Lengths of the documents that samples are cut from, for FLOPs and times where they are masked: text of
    // planner/model/document_lengths.hpp, empty: every sample is one.
    std::string lengths;

    // mesh: gpus = tp*cp*dp*pp = etp*ep*edp*pp
    int gpus = 1;
    int tp = 1, cp = 1, dp = 1, pp = 1, vpp = 1;
    int ep = 1, etp = 1, edp = 1;
    std::string rank_order = "tp-cp-ep-dp-pp"; // left varies fastest

    std::int64_t mbs = 1; // sequences per micro-batch
    ScheduleKind schedule = ScheduleKind::one_f_one_b;
    std::string layout; // "" = stages cut as evenly as possible; else Megatron's layout string

    machine::Precision precision = machine::Precision::bf16; // precision of the linear layers
    // Precisions of their own. By default the core of attention and the LM head are not quantized, and experts have
    // `precision`.
    std::optional<machine::Precision> attention_precision, expert_precision, head_precision;
    int bf16_first = 0,
        bf16_last = 0; // decoder layers that stay in BF16; set by keep_in_bf16(), which marks the model's
    Fp8Scaling fp8_scaling = Fp8Scaling::current;
    // Of plans that quantize by rows (blocks_by_rows()): wgrad multiplies in FP8, too; off: in BF16. Other stacks
    // multiply it as their recipe does. Megatron-LM and Transformer Engine have the name, for delayed scaling.
    bool fp8_wgrad = false;
    // In which gradients are summed and reduced: fp32 or bf16, see StackTraits::reduces_bf16_copy.
    machine::Precision gradients = machine::Precision::fp32;
    unsigned recompute = 0; // set of recompute:: modules
    unsigned offload = 0;   // set of offload:: modules
    OptimizerChoice optimizer;
    Lora lora; // what is trained in place of the weights
    // Weights, gradients and optimizer states are sharded over the data-parallel group: see reshards().
    bool fsdp = false;
    // HSDP, of plans that reshard: copies of the weights, each sharded over so much smaller a part of the group.
    int fsdp_replicas = 1;
    Dispatcher dispatcher = Dispatcher::alltoall;
    ContextComm cp_comm = ContextComm::ring;
    double capacity = 0.0; // factor over the balanced load; 0 = worst case, never overflows
    // True, with a capacity: the routed rows that backward needs wait in pages, which hold the rows there are, not the
    // planned.
    bool paged_stash = false;
    // Routing weights multiply the activation before FC2, so that FC2's output need not be kept; off: they multiply
    // that output (arXiv 2603.07685 section 4.1.2).
    bool memory_efficient_permutation = true;
    bool tp_overlap = false; // products pipelined with their all-gather or reduce-scatter over TP
    bool ep_overlap = false;
    bool delay_wgrad = false; // weight gradients wait for the next window of communication
    CudaGraph cuda_graph = CudaGraph::none;
    // A step has the same bits every time it is run. Off: a GPU adds up attention's query gradients in any order, which
    // is faster and takes less memory. CPUs always sum in one order.
    bool deterministic = false;

    // Rows of experts are known before the step, whatever is routed where.
    bool fixed_rows() const { return capacity > 0.0 || router.pad_to_capacity; }
    int micro_batches() const { return static_cast<int>(gbs / (mbs * dp)); }
    // FSDP without a pipeline: a layer's weights are gathered before its forward and again before its backward, its
    // gradients reduced behind its backward. In a pipeline, weights stay gathered and gradients whole until the last
    // micro-batch (arXiv 2407.21783 section 3.3.2), which is what the distributed optimizer does anyway.
    bool reshards() const { return fsdp && pp == 1; }
    bool steps_on_host() const { return (offload & offload::optimizer_step) != 0; }
    int stage_ranks() const { return tp * cp * dp; } // ranks of one pipeline stage
    machine::Precision activations() const {
        return precision == machine::Precision::fp32 ? machine::Precision::fp32 : machine::Precision::bf16;
    }
    machine::Precision core_attention() const { return attention_precision.value_or(activations()); }
    machine::Precision experts() const { return expert_precision.value_or(precision); }
    machine::Precision head() const { return head_precision.value_or(activations()); }
    // Rows of the vocabulary on all ranks of TP: what the model asks (Model::padded_vocab), filled up to
    // StackTraits::vocab_alignment on each. Parameters, losses and checkpoints keep the model's own size.
    std::int64_t padded_vocab() const;
    // True for our stack where products are fp8-blockwise or fp8-tensor: a tensor has one quantized form, scaled by 1 x
    // 128 of its rows, all alike in fp8-tensor, which the forward and dgrad multiply. wgrad, whose contracted index is
    // the tokens, multiplies in BF16: the gradient of the output as it is (in fp8-tensor as it is rounded), and the
    // saved FP8 input widened, which loses nothing since scales are powers of two. With fp8_wgrad the backward makes of
    // it what wgrad multiplies, scaled by 128 x 1 of the rows of each group, which loses only what is 2^14 times
    // smaller than the largest of its block. Published stacks keep that second form from the forward on.
    bool blocks_by_rows() const;
    // The precision in which products of a wanted one run. Our stack multiplies fp8-tensor by the kernels of
    // fp8-blockwise, on Hopper and on CPUs. It emulates mxfp8 and nvfp4: operands are rounded to what the format
    // represents and multiplied in BF16, which holds every such value. So it does fp8-tensor on other GPUs, in widths
    // that those kernels do not take, and where weights are not quantized as a step begins: under FSDP, with offloaded
    // states and with copies of key heads. Else the wanted one.
    machine::Precision computed_in(machine::Precision wanted) const;
    bool emulates(machine::Precision wanted) const {
        return wanted != machine::Precision::bf16 && computed_in(wanted) == machine::Precision::bf16;
    }
    // Whether gradients are rounded stochastically: some products are nvfp4, emulated.
    bool rounds_stochastically() const;
    // Whether our stack keeps the histories of delayed scaling.
    bool keeps_scales() const;
    // Megatron's optimizer works in FP32: bytes per element of a rank's shard that it copies to while it steps, all
    // of a rank's at once. Gradients of a BF16 buffer, unless an optimizer of BF16 moments reads them as they are (in
    // BF16 and FP8 with delayed scaling); moments that are kept in less. 0 under FSDP, whose optimizer is another one.
    // Source: Megatron-LM, megatron/core/optimizer/distrib_optimizer.py (_copy_model_grads_to_main_grads) and
    // optimizer_config.py (use_precision_aware_optimizer_no_fp8_or_ds_fp8); TransformerEngine,
    // pytorch/optimizers/fused_adam.py (get_unscaled_state, for every parameter of a group before its kernel runs).
    int optimizer_copy_bytes() const;
    // Tokens of one micro-batch on one rank: inside the TP region (sequence gathered over TP) and outside of it.
    std::int64_t tokens_gathered() const { return mbs * seq / cp; }
    // The lengths that attention keeps within; no bins where it sees whole samples.
    model::DocumentLengths masked_lengths() const;
    bool masks_documents() const { return documents == Documents::mask; }
    // Rows of a micro-batch whose queries a rank holds in attention: of whole sequences where CP trades heads.
    std::int64_t attention_rows() const;
    bool
    passes_states() const; // whether layers of the model pass a state along whole sequences (gated delta nets, Mamba)
    std::int64_t tokens_local() const { return mbs * seq / (static_cast<std::int64_t>(cp) * tp); }
};

// "adamw" (FP32 moments), "adamw+bf16_moments", "adamw+fp8_exp_avg" or "muon".
std::string to_string(const OptimizerChoice& choice);
OptimizerChoice optimizer_from_string(const std::string& text);

// Model FLOPs of a token by model_flops_per_token(), within documents where the plan masks them. Frozen linear layers
// have no wgrad, and adapters are left out (Megatron-Bridge, training/utils/flop_utils.py,
// num_floating_point_operations under LoRA).
double flops_per_token(const Plan& plan);

// The reason why a plan is impossible, empty when it is sound: divisibility of every axis, both factorings equal to
// gpus, layers against stages, experts against EP, heads against TP, batch against DP*MBS, and so on. `counter` is a
// short key under which search counts the rejection ("experts % ep", ...); `message` names the numbers.
struct PlanFault {
    std::string counter, message;
    explicit operator bool() const { return !counter.empty(); }
};
PlanFault check_plan(const Plan& plan);

// plan.json. from_json throws Error (bad_input) for anything that is not a sound plan, naming the field.
std::string plan_to_json(const Plan& plan);
Plan plan_from_json(const std::string& text, const std::string& place);
Plan load_plan(const std::string& path);
// Pins or sets one field by the names of the CLI's --fix (tp, cp, ..., cuda_graph). Throws Error (bad_input).
void set_field(Plan& plan, const std::string& field, const std::string& value);

} // namespace moe::plan
