// The choices of a plan that have names: schedules, dispatchers, CUDA graphs, sets of modules.
#pragma once

#include <cstdint>
#include <string>

namespace moe::plan {

// zero_bubble: ZB-H1 (arXiv 2401.10241), 1F1B whose weight gradients are slots of their own. In a V a rank holds a
// chunk on the way down the pipeline and one on the way back: zb_v (ZB-V, the same paper) splits every backward,
// dualpipe_v (the half of DeepSeek's DualPipe that keeps one copy of the weights) runs a forward of one chunk beside a
// backward of the other and splits backwards where it starts and ends.
enum class ScheduleKind : std::uint8_t { one_f_one_b, interleaved, zero_bubble, zb_v, dualpipe_v };
constexpr bool splits_backward(ScheduleKind kind) {
    return kind == ScheduleKind::zero_bubble || kind == ScheduleKind::zb_v || kind == ScheduleKind::dualpipe_v;
}
constexpr bool in_a_v(ScheduleKind kind) { return kind == ScheduleKind::zb_v || kind == ScheduleKind::dualpipe_v; }
enum class Dispatcher : std::uint8_t { alltoall, allgather, deepep, hybridep, ncclep };
// Tokens arrive grouped by the experts of a rank, without a sort of their rows.
constexpr bool groups_by_expert(Dispatcher dispatcher) {
    return dispatcher == Dispatcher::hybridep || dispatcher == Dispatcher::ncclep;
}
// How keys and queries come together under CP: keys and values travel round a ring, heads are traded for tokens, or
// hierarchically: heads for tokens within an NVLink domain and a ring over the domains (context_inner() in mesh.hpp).
enum class ContextComm : std::uint8_t { ring, alltoall, hierarchical };
// Whether documents that lie in one sample see each other: ignore, as if the sample were one document; mask: attention,
// positions and loss stay within each (Megatron's --reset-attention-mask, --reset-position-ids and --eod-mask-loss).
enum class Documents : std::uint8_t { ignore, mask };
enum class Fp8Scaling : std::uint8_t { current, delayed }; // fp8-tensor takes scales of this tensor, or of its history

// The work that CUDA graphs hold: a set of Megatron's scopes (attn with norms and residuals, mlp of dense layers, ...),
// all that has static shapes (partial), or the whole step (full).
enum class CudaGraph : std::uint8_t {
    none = 0,
    attn = 1,
    mlp = 2,
    moe_router = 4,
    moe_preprocess = 8,
    shared_experts = 16,
    partial = attn | mlp | moe_router | moe_preprocess | shared_experts,
    full = 32,
};
constexpr CudaGraph operator|(CudaGraph a, CudaGraph b) {
    return static_cast<CudaGraph>(static_cast<unsigned>(a) | static_cast<unsigned>(b));
}
constexpr bool holds(CudaGraph set, CudaGraph scope) { return (set | scope) == set; }

// Modules that can be recomputed in the backward pass, by Megatron's names; a plan holds a set of them. `operators` is
// torchtitan's selective checkpointing: of a layer, attention's core, exchanges and every second product are kept, all
// else is computed again (torchtitan/distributed/activation_checkpoint.py, SelectiveAC and before it _apply_op_sac).
namespace recompute {
inline constexpr unsigned layernorm = 1, core_attn = 2, mla_up_proj = 4, moe_act = 8, mlp = 16, shared_experts = 32,
                          moe = 64, full = 128, operators = 256;
std::string to_string(unsigned set);           // "layernorm+moe_act", "none"
unsigned from_string(const std::string& text); // throws Error (bad_input) naming the known modules
} // namespace recompute

// Modules whose input activations wait in host memory for their backward, by Megatron's fine-grained names, and the
// optimizer: its states, which wait there between steps, or the step as well, which the host's cores make on states
// that never leave it. A plan holds a set of them.
namespace offload {
inline constexpr unsigned attn_norm = 1, qkv_linear = 2, core_attn = 4, attn_proj = 8, mlp_norm = 16, expert_fc1 = 32,
                          moe_act = 64, optimizer = 128, optimizer_step = 256;
inline constexpr unsigned activations = optimizer - 1, states = optimizer | optimizer_step;
std::string to_string(unsigned set);           // "expert_fc1+moe_act", "none"
unsigned from_string(const std::string& text); // throws Error (bad_input) naming the known modules
} // namespace offload

// Over which tokens the auxiliary loss wants experts equally loaded; by Megatron's names aux_loss, seq_aux_loss and
// global_aux_loss. sinkhorn has no loss: while it trains, experts are chosen by logits that Sinkhorn's iteration has
// balanced over the tokens of one rank's micro-batch (S-BASE, arXiv 2202.01169 section 3.2).
enum class LoadBalancing : std::uint8_t { micro_batch, sequence, global, sinkhorn };
// The tokens beyond an expert's capacity that are dropped: those of the lowest weight or those that come last.
enum class DropPolicy : std::uint8_t { probs, position };
// The tokens that compete for an expert's capacity: those of one rank's micro-batch, which TP and CP leave a part of
// its sequences, or those of one whole sequence, whose ranks gather their choices (arXiv 2504.14960 section 3.3 names
// both).
enum class DropScope : std::uint8_t { sub_sequence, full_sequence };

// In which AdamW keeps its moments. fp8: exp_avg in MXFP8 (E4M3, 32 elements with one power of two), exp_avg_sq in
// BF16. Of exp_avg_sq E4M3 would round away what a step adds, 1 - beta2 of a square, so that its sum stalls; arXiv
// 2310.18313 section 2.2 keeps it in 16 bits as well.
enum class Moments : std::uint8_t { fp32, bf16, fp8 };

// Sparse attention: attention over picked keys and the indexer's loss over these; the loss over all keys that a query
// sees; or attention over all of them as well, while nothing but the indexer is trained.
enum class IndexerStage : std::uint8_t { sparse, dense_loss, warm_up };

const char* to_string(ScheduleKind kind);
const char* to_string(Dispatcher dispatcher);
const char* to_string(ContextComm comm);
const char* to_string(Documents documents);
const char* to_string(Fp8Scaling scaling);
const char* to_string(LoadBalancing balancing);
const char* to_string(DropPolicy policy);
const char* to_string(DropScope scope);
const char* to_string(IndexerStage stage);
std::string to_string(CudaGraph graph); // "none", "partial", "full", "attn+moe_router"
ScheduleKind schedule_from_string(const std::string& text);
Dispatcher dispatcher_from_string(const std::string& text);
ContextComm context_comm_from_string(const std::string& text);
Documents documents_from_string(const std::string& text);
Fp8Scaling fp8_scaling_from_string(const std::string& text);
LoadBalancing load_balancing_from_string(const std::string& text);
DropPolicy drop_policy_from_string(const std::string& text);
DropScope drop_scope_from_string(const std::string& text);
IndexerStage indexer_stage_from_string(const std::string& text);
CudaGraph cuda_graph_from_string(const std::string& text);

} // namespace moe::plan
