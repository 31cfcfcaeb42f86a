// Names of a plan's choices and their way back from text.
#include "planner/plan/plan.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/document_lengths.hpp"
#include "planner/model/indexer_flops.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/plan_choices.hpp"
#include "planner/plan/stack_traits.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

namespace moe::plan {
namespace {

constexpr std::array<const char*, 5> schedule_names{"1f1b", "interleaved", "zero-bubble", "zb-v", "dualpipe-v"};
constexpr std::array<const char*, 5> dispatcher_names{"alltoall", "allgather", "deepep", "hybridep", "ncclep"};
constexpr std::array<const char*, 3> context_comm_names{"ring", "alltoall", "alltoall+ring"};
constexpr std::array<const char*, 2> documents_names{"ignore", "mask"};
constexpr std::array<const char*, 2> scaling_names{"current", "delayed"};
constexpr std::array<const char*, 4> balancing_names{"aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"};
constexpr std::array<const char*, 2> drop_names{"probs", "position"};
constexpr std::array<const char*, 2> drop_scope_names{"sub_sequence", "full_sequence"};
constexpr std::array<const char*, 3> stage_names{"sparse", "dense_loss", "warm_up"};
constexpr std::array<const char*, 6> graph_names{"attn",           "mlp", "moe_router", "moe_preprocess",
                                                 "shared_experts", "full"};
constexpr std::array<const char*, 9> recompute_names{"layernorm",      "core_attn", "mla_up_proj", "moe_act",  "mlp",
                                                     "shared_experts", "moe",       "full",        "operators"};
constexpr std::array<const char*, 9> offload_names{"attn_norm",  "qkv_linear", "core_attn", "attn_proj",     "mlp_norm",
                                                   "expert_fc1", "moe_act",    "optimizer", "optimizer_step"};

// Position of `text` in the names of a choice; refuses others with the known ones.
template <std::size_t size>
std::size_t position(const std::array<const char*, size>& names, const char* what, const std::string& text) {
    const std::vector<std::string> known(names.begin(), names.end());
    const auto found = std::find(known.begin(), known.end(), text);
    if (found == known.end())
        refuse("{} '{}' is unknown{}; known are {}", what, shown(text), did_you_mean(text, known),
               fmt::join(known, ", "));
    return static_cast<std::size_t>(found - known.begin());
}

// Names of the bits of a set, joined by '+'.
template <std::size_t size>
std::string set_to_string(const std::array<const char*, size>& names, unsigned set) {
    std::string text;
    for (std::size_t i = 0; i < size; ++i) {
        if ((set >> i & 1U) == 0) continue;
        if (!text.empty()) text += '+';
        text += names[i];
    }
    return text.empty() ? "none" : text;
}

template <std::size_t size>
unsigned set_from_string(const std::array<const char*, size>& names, const char* what, const std::string& text) {
    if (text == "none" || text.empty()) return 0;
    unsigned set = 0;
    for (std::size_t at = 0; at <= text.size();) {
        const std::size_t plus = std::min(text.find('+', at), text.size());
        set |= 1U << position(names, what, text.substr(at, plus - at));
        at = plus + 1;
    }
    return set;
}

} // namespace

std::int64_t Plan::padded_vocab() const {
    const std::int64_t asked = model->padded_vocab(tp), step = std::int64_t{stack_traits(stack).vocab_alignment} * tp;
    return (asked + step - 1) / step * step;
}

bool Plan::blocks_by_rows() const { return stack_traits(stack).quantizes_by_rows; }

namespace {

// Whether kernels of fp8-blockwise multiply fp8-tensor: of weights that lie whole on a device that has them, in widths
// that they take.
bool multiplies_fp8_tensor(const Plan& plan) {
    if (plan.reshards() || (plan.offload & offload::states) != 0 || key_replicas(plan) > 1) return false;
    const machine::Hardware* hardware = plan.hardware.get();
    if (hardware != nullptr && !hardware->cpu && std::floor(hardware->compute_capability) != 9.0) return false;
    constexpr auto blockwise = static_cast<std::size_t>(machine::Precision::fp8_blockwise);
    if (hardware != nullptr && hardware->peak_flops[blockwise] <= 0.0) return false;
    return plan.model == nullptr || check_fp8_widths(plan).message.empty();
}

} // namespace

machine::Precision Plan::computed_in(machine::Precision wanted) const {
    if (!stack_traits(stack).emulates_precisions) return wanted;
    switch (wanted) {
    case machine::Precision::fp8_tensor:
        return multiplies_fp8_tensor(*this) ? machine::Precision::fp8_blockwise : machine::Precision::bf16;
    case machine::Precision::mxfp8:
    case machine::Precision::nvfp4:
        return machine::Precision::bf16;
    default:
        return wanted;
    }
}

bool Plan::keeps_scales() const {
    return fp8_scaling == Fp8Scaling::delayed && stack_traits(stack).emulates_precisions;
}

bool Plan::rounds_stochastically() const {
    constexpr machine::Precision fp4 = machine::Precision::nvfp4;
    return emulates(fp4) && (precision == fp4 || experts() == fp4 || head() == fp4);
}

model::DocumentLengths Plan::masked_lengths() const {
    return masks_documents() ? model::document_lengths_from_string(lengths) : model::DocumentLengths{};
}

namespace {

// FLOPs of a token, of which the model's count takes indexers to be trained over the keys that they pick.
double trained_flops(const Plan& plan, const model::DocumentLengths& lengths) {
    const IndexerTraining& indexer = plan.indexer;
    const auto gradients = [&](bool all) {
        return model::indexer_gradient_flops(*plan.model, plan.seq, all, &lengths);
    };
    if (indexer.stage == IndexerStage::warm_up) { // attention goes over all keys too
        model::Model dense = *plan.model;
        for (model::LayerKind& kind : dense.kinds)
            if (kind.attention.sparse()) kind.attention.indexer_top_k = static_cast<int>(plan.seq);
        return model::model_flops_per_token(dense, plan.seq, plan.tp, &lengths);
    }
    const double picked = model::model_flops_per_token(*plan.model, plan.seq, plan.tp, &lengths);
    if (indexer.stage == IndexerStage::dense_loss) return picked - gradients(false) + gradients(true);
    return indexer.loss > 0.0 ? picked : picked - gradients(false);
}

} // namespace

double flops_per_token(const Plan& plan) {
    const model::DocumentLengths lengths = plan.masked_lengths();
    const double all = trained_flops(plan, lengths);
    if (!plan.lora.on()) return all;
    return all - model::model_flops_per_token(*plan.model, 0, plan.tp) / 3.0; // of no keys: the linear layers
}

int Plan::optimizer_copy_bytes() const {
    if (!stack_traits(stack).optimizer_copies || reshards()) return 0;
    const bool plain = precision == machine::Precision::bf16 ||
                       (precision == machine::Precision::fp8_tensor && fp8_scaling == Fp8Scaling::delayed);
    const bool narrow = optimizer.moments != Moments::fp32;
    const bool read_as_they_are = narrow && plain;
    return (gradients == machine::Precision::bf16 && !read_as_they_are ? 4 : 0) + (narrow ? 8 : 0);
}

const char* to_string(ScheduleKind kind) { return schedule_names[static_cast<std::size_t>(kind)]; }
const char* to_string(Dispatcher dispatcher) { return dispatcher_names[static_cast<std::size_t>(dispatcher)]; }
const char* to_string(ContextComm comm) { return context_comm_names[static_cast<std::size_t>(comm)]; }
const char* to_string(Documents documents) { return documents_names[static_cast<std::size_t>(documents)]; }
const char* to_string(Fp8Scaling scaling) { return scaling_names[static_cast<std::size_t>(scaling)]; }
const char* to_string(LoadBalancing balancing) { return balancing_names[static_cast<std::size_t>(balancing)]; }
const char* to_string(DropPolicy policy) { return drop_names[static_cast<std::size_t>(policy)]; }
const char* to_string(DropScope scope) { return drop_scope_names[static_cast<std::size_t>(scope)]; }
const char* to_string(IndexerStage stage) { return stage_names[static_cast<std::size_t>(stage)]; }
std::string to_string(CudaGraph graph) {
    return graph == CudaGraph::partial ? "partial" : set_to_string(graph_names, static_cast<unsigned>(graph));
}

ScheduleKind schedule_from_string(const std::string& text) {
    return static_cast<ScheduleKind>(position(schedule_names, "schedule", text));
}
Dispatcher dispatcher_from_string(const std::string& text) {
    return static_cast<Dispatcher>(position(dispatcher_names, "dispatcher", text));
}
ContextComm context_comm_from_string(const std::string& text) {
    return static_cast<ContextComm>(position(context_comm_names, "cp_comm", text));
}
Documents documents_from_string(const std::string& text) {
    return static_cast<Documents>(position(documents_names, "documents", text));
}
Fp8Scaling fp8_scaling_from_string(const std::string& text) {
    return static_cast<Fp8Scaling>(position(scaling_names, "fp8_scaling", text));
}
LoadBalancing load_balancing_from_string(const std::string& text) {
    return static_cast<LoadBalancing>(position(balancing_names, "load_balancing", text));
}
DropPolicy drop_policy_from_string(const std::string& text) {
    return static_cast<DropPolicy>(position(drop_names, "drop_policy", text));
}
DropScope drop_scope_from_string(const std::string& text) {
    return static_cast<DropScope>(position(drop_scope_names, "drop_scope", text));
}
IndexerStage indexer_stage_from_string(const std::string& text) {
    return static_cast<IndexerStage>(position(stage_names, "indexer_stage", text));
}
CudaGraph cuda_graph_from_string(const std::string& text) {
    if (text == "partial") return CudaGraph::partial;
    return static_cast<CudaGraph>(set_from_string(graph_names, "cuda_graph scope", text));
}

std::string to_string(const OptimizerChoice& choice) {
    constexpr std::array moments{"", "+bf16_moments", "+fp8_exp_avg"};
    return std::string(choice.muon ? "muon" : "adamw") + moments[static_cast<std::size_t>(choice.moments)];
}

OptimizerChoice optimizer_from_string(const std::string& text) {
    constexpr std::array names{"adamw", "adamw+bf16_moments", "adamw+fp8_exp_avg", "muon"};
    const auto choice = position(names, "optimizer", text);
    return choice == 3 ? OptimizerChoice{Moments::fp32, true} : OptimizerChoice{static_cast<Moments>(choice)};
}

namespace recompute {

std::string to_string(unsigned set) { return set_to_string(recompute_names, set); }
unsigned from_string(const std::string& text) { return set_from_string(recompute_names, "recompute module", text); }

} // namespace recompute

namespace offload {

std::string to_string(unsigned set) { return set_to_string(offload_names, set); }
unsigned from_string(const std::string& text) { return set_from_string(offload_names, "offload module", text); }

} // namespace offload

} // namespace moe::plan
