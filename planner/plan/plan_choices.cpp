// The choices of a plan against its model, its machine and each other.
#include "planner/plan/plan_choices.hpp"

#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/routing.hpp"
#include "planner/plan/stack_traits.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

namespace moe::plan {

PlanFault check_recompute(const Plan& plan) {
    using namespace recompute;
    constexpr unsigned all =
        layernorm | core_attn | mla_up_proj | moe_act | mlp | shared_experts | moe | full | operators;
    if ((plan.recompute & ~all) != 0)
        return fault("recompute", "recompute: set {} holds unknown modules", plan.recompute);
    if ((plan.recompute & full) != 0 && plan.recompute != full)
        return fault("recompute", "recompute = {}: full already holds the other modules",
                     recompute::to_string(plan.recompute));
    if ((plan.recompute & operators) != 0 && plan.recompute != operators)
        return fault("recompute", "recompute = {}: operators is a rule for all modules, name it alone",
                     recompute::to_string(plan.recompute));
    const auto latent = [](const model::LayerKind& kind) {
        return kind.attention.kind == model::AttentionKind::mla ||
               kind.attention.kind == model::AttentionKind::compressed;
    };
    const auto& kinds = plan.model->kinds;
    if ((plan.recompute & mla_up_proj) != 0 && std::none_of(kinds.begin(), kinds.end(), latent))
        return fault("recompute", "recompute = mla_up_proj: {} has no latent attention", plan.model->name);
    const unsigned routed = plan.recompute & (moe_act | moe | shared_experts);
    if (routed != 0 && !has_experts(plan))
        return fault("recompute", "recompute = {}: {} has no experts", recompute::to_string(routed), plan.model->name);
    return {};
}

namespace {

bool runs(const machine::Hardware& hardware, machine::Precision precision) {
    return hardware.peak_flops[static_cast<std::size_t>(precision)] > 0.0;
}

PlanFault check_precision(const Plan& plan) {
    const machine::Hardware& hardware = *plan.hardware;
    struct Choice {
        const char* field;
        std::optional<machine::Precision> precision;
    };
    const std::array choices{
        Choice{"precision", plan.precision}, Choice{"attention_precision", plan.attention_precision},
        Choice{"expert_precision", plan.expert_precision}, Choice{"head_precision", plan.head_precision}};
    for (const auto& [field, precision] : choices) {
        if (!precision) continue;
        if (!runs(hardware, plan.computed_in(*precision)))
            return fault(field, "{} = {}: {} cannot run it", field, machine::to_string(*precision), hardware.name);
        if ((*precision == machine::Precision::fp32) != (plan.precision == machine::Precision::fp32))
            return fault(field, "{} = {}: FP32 and other precisions do not mix (precision = {})", field,
                         machine::to_string(*precision), machine::to_string(plan.precision));
    }
    if (plan.attention_precision == machine::Precision::nvfp4 ||
        plan.attention_precision == machine::Precision::fp8_blockwise)
        return fault("attention_precision", "attention_precision = {}: no attention kernel takes it, use fp8-tensor",
                     machine::to_string(*plan.attention_precision));
    if (plan.expert_precision && !has_experts(plan))
        return fault("expert_precision", "expert_precision = {}: {} has no experts",
                     machine::to_string(*plan.expert_precision), plan.model->name);
    if (plan.head_precision && plan.model->tied_embeddings)
        return fault("head_precision", "head_precision = {}: {} ties its head to the embedding, which is not quantized",
                     machine::to_string(*plan.head_precision), plan.model->name);
    if (plan.bf16_first + plan.bf16_last > 0 && plan.precision <= machine::Precision::bf16 &&
        plan.experts() <= machine::Precision::bf16)
        return fault("bf16_layers", "bf16_layers = {}+{}: nothing else is quantized, precision = {}", plan.bf16_first,
                     plan.bf16_last, machine::to_string(plan.precision));
    if (plan.fp8_scaling == Fp8Scaling::delayed && plan.precision != machine::Precision::fp8_tensor &&
        plan.expert_precision != machine::Precision::fp8_tensor)
        return fault("fp8_scaling", "fp8_scaling = delayed: only fp8-tensor has it, precision = {}",
                     machine::to_string(plan.precision));
    const auto in_fp8 = [&plan](machine::Precision p) {
        return plan.computed_in(p) == machine::Precision::fp8_blockwise;
    };
    if (plan.fp8_wgrad && !in_fp8(plan.precision) && !in_fp8(plan.experts()) && !in_fp8(plan.head()))
        return fault("fp8_wgrad",
                     "fp8_wgrad = on: no products are multiplied in fp8-blockwise or fp8-tensor, precision = {}",
                     machine::to_string(plan.precision));
    if (plan.fp8_wgrad && plan.lora.on())
        return fault("fp8_wgrad", "fp8_wgrad = on: under lora = {} the quantized weights are frozen and have no wgrad",
                     to_string(plan.lora));
    if (plan.gradients != machine::Precision::fp32 && plan.gradients != machine::Precision::bf16)
        return fault("gradients", "gradients = {}: must be fp32 or bf16", machine::to_string(plan.gradients));
    return {};
}

// Schedules that split backwards: weight gradients are slots already, and they are what fills the pipeline.
PlanFault check_split_backward(const Plan& plan) {
    if (!splits_backward(plan.schedule)) return {};
    const char* name = to_string(plan.schedule);
    if ((plan.offload & offload::activations) != 0)
        return fault("schedule: offload",
                     "schedule {} keeps activations until their weight gradients: offload = {} must be none or "
                     "optimizer",
                     name, offload::to_string(plan.offload));
    if (plan.schedule == ScheduleKind::dualpipe_v) return {};
    if (plan.ep_overlap)
        return fault("schedule: ep_overlap", "schedule {} has no whole backward for ep_overlap to run beside: use {}",
                     name, "dualpipe-v");
    if (plan.delay_wgrad)
        return fault("schedule: delay_wgrad", "schedule {} splits weight gradients off itself: set delay_wgrad off",
                     name);
    return {};
}

PlanFault check_offload(const Plan& plan) {
    using namespace offload;
    if ((plan.offload & ~(activations | states)) != 0)
        return fault("offload", "offload: set {} holds unknown modules", plan.offload);
    if ((plan.offload & (expert_fc1 | moe_act)) != 0 && !has_experts(plan))
        return fault("offload", "offload = {}: {} has no experts",
                     offload::to_string(plan.offload & (expert_fc1 | moe_act)), plan.model->name);
    if ((plan.offload & states) == states)
        return fault("offload",
                     "offload = {}: with optimizer_step states never come to the device: leave optimizer out",
                     offload::to_string(plan.offload));
    const machine::Precision stored = std::max(plan.computed_in(plan.precision), plan.computed_in(plan.experts()));
    if (plan.steps_on_host() && stored > machine::Precision::bf16)
        return fault("offload",
                     "offload = {}: weights of precision = {} are quantized from masters, which must come to the "
                     "device: set optimizer",
                     offload::to_string(plan.offload), machine::to_string(stored));
    if (plan.steps_on_host() && plan.optimizer.muon)
        return fault("offload", "offload = {}: optimizer = muon multiplies matrices, on the device: set optimizer",
                     offload::to_string(plan.offload));
    if (plan.paged_stash && (plan.offload & (expert_fc1 | moe_act)) != 0)
        return fault("offload", "offload = {}: paged_stash = on keeps routed rows on the device already",
                     offload::to_string(plan.offload & (expert_fc1 | moe_act)));
    return {};
}

// Who trades heads takes whole ones.
PlanFault check_context(const Plan& plan) {
    if (plan.cp_comm == ContextComm::ring) return {};
    const char* name = to_string(plan.cp_comm);
    if (plan.cp == 1) return fault("cp_comm", "cp_comm = {} needs cp > 1, but cp = 1", name);
    const bool whole = plan.cp_comm == ContextComm::alltoall;
    const int trading = context_inner(plan);
    if (!whole && (trading == 1 || trading == plan.cp))
        return fault("cp_comm",
                     "cp_comm = {} needs a CP group that spans NVLink domains and has several ranks in each, but {} of "
                     "cp = {} ranks are in one: use {}",
                     name, trading, plan.cp, trading == 1 ? "ring" : "ring or alltoall");
    const std::int64_t parts = static_cast<std::int64_t>(plan.tp) * trading;
    for (const model::LayerKind& kind : plan.model->kinds) {
        const model::Attention& a = kind.attention;
        // Layers with a state trade tokens for heads whatever the others do.
        const bool delta = a.kind == model::AttentionKind::gated_delta;
        if (a.kind == model::AttentionKind::mamba || a.kind == model::AttentionKind::none || delta) continue;
        if (a.sparse())
            return fault("cp_comm", "cp_comm = {}: keys that an indexer picks are gathered over cp, use ring", name);
        if (a.kind != model::AttentionKind::gqa && a.kind != model::AttentionKind::mla)
            return fault("cp_comm", "cp_comm = {}: {} has attention without heads to split, use ring", name,
                         plan.model->name);
        const std::int64_t kv_heads = a.kind == model::AttentionKind::gqa ? a.kv_heads : a.heads;
        if (a.heads % parts != 0 || kv_heads % parts != 0)
            return fault("cp_comm",
                         "cp_comm = {}: heads = {}, kv heads = {} are not divisible by tp * {} = {} * {} = {}", name,
                         a.heads, kv_heads, whole ? "cp" : "ranks of a domain", plan.tp, trading, parts);
    }
    return {};
}

// HSDP cuts the data axis of either factoring, of that of experts only where it has several ranks.
PlanFault check_replicas(const Plan& plan) {
    const int copies = plan.fsdp_replicas;
    if (copies == 1) return {};
    if (!plan.reshards())
        return fault("fsdp_replicas", "fsdp_replicas = {} needs fsdp = on without a pipeline, but {}", copies,
                     plan.fsdp ? fmt::format("pp = {}", plan.pp) : std::string("fsdp = off"));
    if (copies < 1 || plan.dp % copies != 0)
        return fault("fsdp_replicas", "fsdp_replicas = {}: dp = {} is not divisible by it", copies, plan.dp);
    if (has_experts(plan) && plan.edp > 1 && plan.edp % copies != 0)
        return fault("fsdp_replicas", "fsdp_replicas = {}: edp = {} is neither 1 nor divisible by it", copies,
                     plan.edp);
    return {};
}

PlanFault check_communication(const Plan& plan) {
    if (PlanFault found = check_replicas(plan)) return found;
    if (plan.optimizer.muon && plan.optimizer.narrow())
        return fault("optimizer", "optimizer = {}: narrow moments are AdamW's, use muon", to_string(plan.optimizer));
    if (plan.optimizer.muon && plan.reshards())
        return fault("optimizer",
                     "optimizer = muon: it orthogonalizes whole gradients, of which fsdp = on keeps shards alone: use "
                     "fsdp = off");
    if (plan.reshards() && plan.ep_overlap)
        return fault("fsdp",
                     "fsdp = on: without a pipeline it excludes ep_overlap = on, whose merged layers would need "
                     "both weights at once");
    if (plan.ep_overlap && plan.ep == 1) return fault("ep_overlap", "ep_overlap = on needs ep > 1, but ep = 1");
    if (plan.tp_overlap && plan.tp == 1) return fault("tp_overlap", "tp_overlap = on needs tp > 1, but tp = 1");
    if (plan.delay_wgrad && plan.ep == 1 && plan.pp == 1)
        return fault("delay_wgrad", "delay_wgrad = on needs communication to fill: ep > 1 or pp > 1");
    return check_context(plan);
}

// What adapters are not beside, or not beside yet.
PlanFault check_lora(const Plan& plan) {
    if (!plan.lora.on()) return {};
    const std::string lora = to_string(plan.lora);
    const auto plain = [](machine::Precision p) { return p <= machine::Precision::bf16; };
    if (!plain(plan.precision) || !plain(plan.core_attention()) || !plain(plan.experts()) || !plain(plan.head()))
        return fault("lora", "lora = {}: frozen weights are kept as they are read: use precision = bf16 or fp32", lora);
    if (plan.optimizer.muon) return fault("lora", "lora = {}: adapters are AdamW's, use optimizer = adamw", lora);
    if (plan.fsdp) return fault("lora", "lora = {}: frozen weights are not sharded: use fsdp = off", lora);
    if (plan.tp_overlap)
        return fault("lora", "lora = {}: products with adapters do not run in pieces: use tp_overlap = off", lora);
    if (plan.router.bias_update > 0.0)
        return fault("lora", "lora = {}: the selection bias is frozen: use bias_update = none", lora);
    if (!plan.hardware->cpu && plan.lora.rank % 8 != 0)
        return fault("lora", "lora = {}: products of GPUs take 16 bytes at a time: use a rank that 8 divides", lora);
    unsigned has = 0;
    for (const model::LayerKind& kind : plan.model->kinds) {
        const model::Attention& a = kind.attention;
        if (a.kind != model::AttentionKind::none) {
            if ((a.kind != model::AttentionKind::gqa && a.kind != model::AttentionKind::mla) || a.sparse())
                return fault("lora",
                             "lora = {}: {} has attention other than grouped queries and MLA, which cannot be frozen",
                             lora, plan.model->name);
            has |= adapted::attention;
        }
        if (kind.dense() || (kind.moe && kind.moe->shared_ffn > 0)) has |= adapted::dense;
        if (kind.moe) has |= adapted::experts;
    }
    if ((plan.lora.targets & has) == 0)
        return fault("lora", "lora = {}: {} has nothing to adapt there: use {}", lora, plan.model->name,
                     adapted::to_string(has));
    return {};
}

PlanFault check_routed_rows(const Plan& plan) {
    if (plan.paged_stash && (!has_experts(plan) || plan.capacity == 0.0))
        return fault("paged_stash", "paged_stash = on needs experts with a planned capacity, but capacity = {}",
                     plan.capacity == 0.0 ? std::string("none") : fmt::format("{}", plan.capacity));
    if (plan.memory_efficient_permutation) return {};
    if (!has_experts(plan))
        return fault("memory_efficient_permutation", "memory_efficient_permutation = off: {} has no experts",
                     plan.model->name);
    return {};
}

PlanFault check_routing(const Plan& plan) {
    try {
        routing_from_string(plan.routing);
    } catch (const Error& error) {
        return {"routing", error.what()};
    }
    return {};
}

// Sinkhorn's choice, of models whose own weights are Megatron's behind it: the sigmoid of one expert, or the softmax
// over all where there are several (Megatron-LM router.py, sinkhorn_load_balancing). Others would train by weights that
// their files do not mean.
PlanFault check_sinkhorn(const Plan& plan) {
    const RouterTraining& r = plan.router;
    if (r.load_balancing != LoadBalancing::sinkhorn) return {};
    if (!has_experts(plan))
        return fault("load_balancing", "load_balancing = sinkhorn: {} has no experts", plan.model->name);
    if (r.aux_loss > 0.0)
        return fault("load_balancing", "load_balancing = sinkhorn: it has no loss, aux_loss = {} must be none",
                     r.aux_loss);
    if (r.forced)
        return fault("load_balancing", "load_balancing = sinkhorn: balance = forced makes the choice: set natural");
    for (const model::LayerKind& kind : plan.model->kinds) {
        if (!kind.moe) continue;
        const model::Router& router = kind.moe->router;
        const bool weighs = kind.moe->top_k == 1
                                ? router.scoring == model::Scoring::sigmoid
                                : router.scoring == model::Scoring::softmax && !router.softmax_after_top_k;
        if (!weighs || router.normalize || router.scale != 1.0 || router.groups > 1 || router.expert_bias ||
            router.mixer > 0.0)
            return fault("load_balancing",
                         "load_balancing = sinkhorn: its weights are the sigmoid of one expert or the softmax over all "
                         "experts, not normalized, without groups or bias; the router of {} is another",
                         plan.model->name);
    }
    return {};
}

PlanFault check_indexer(const Plan& plan) {
    const IndexerTraining& indexer = plan.indexer;
    const char* stage = to_string(indexer.stage);
    if (!std::isfinite(indexer.loss) || indexer.loss < 0.0)
        return fault("indexer_loss", "indexer_loss = {}: must be 0 (none) or more", indexer.loss);
    const bool sparse = std::any_of(plan.model->kinds.begin(), plan.model->kinds.end(),
                                    [](const model::LayerKind& kind) { return kind.attention.sparse(); });
    if (!sparse) {
        const IndexerTraining usual;
        if (indexer.loss != usual.loss)
            return fault("indexer_loss", "indexer_loss = {}: {} has no indexer", indexer.loss, plan.model->name);
        if (indexer.stage != usual.stage)
            return fault("indexer_stage", "indexer_stage = {}: {} has no indexer", stage, plan.model->name);
        return {};
    }
    if (indexer.stage != IndexerStage::sparse && indexer.loss == 0.0)
        return fault("indexer_stage", "indexer_stage = {}: there is no loss to train the indexer by: set indexer_loss",
                     stage);
    if (plan.core_attention() > machine::Precision::bf16)
        return fault("attention_precision",
                     "attention_precision = {}: attention over keys that an indexer picks is not quantized, use bf16",
                     machine::to_string(plan.core_attention()));
    return {};
}

// Every value of RouterTraining that its model cannot follow.
PlanFault check_router(const Plan& plan) {
    const RouterTraining& r = plan.router;
    struct Amount {
        const char* field;
        double value;
    };
    const std::array amounts{Amount{"aux_loss", r.aux_loss}, Amount{"z_loss", r.z_loss},
                             Amount{"input_jitter", r.input_jitter}, Amount{"bias_update", r.bias_update},
                             Amount{"expert_capacity", r.expert_capacity}};
    for (const auto& [field, value] : amounts) {
        if (!std::isfinite(value) || value < 0.0) return fault(field, "{} = {}: must be 0 (off) or more", field, value);
        if (value > 0.0 && !has_experts(plan))
            return fault(field, "{} = {}: {} has no experts", field, value, plan.model->name);
    }
    if (r.input_jitter >= 1.0)
        return fault("input_jitter", "input_jitter = {}: must be below 1, or noise would turn inputs round",
                     r.input_jitter);
    if (r.pad_to_capacity && r.expert_capacity == 0.0)
        return fault("pad_to_capacity",
                     "pad_to_capacity = on: there is no capacity to fill up to: set expert_capacity");
    if (r.pad_to_capacity && r.drops_in_sequences())
        return fault("pad_to_capacity",
                     "pad_to_capacity = on: how much of a whole sequence's capacity a rank fills is not known before "
                     "the step: set drop_scope sub_sequence");
    if (r.pad_to_capacity && plan.dispatcher != Dispatcher::alltoall)
        return fault("pad_to_capacity", "pad_to_capacity = on: dispatcher = {} moves tokens, not rows: set alltoall",
                     to_string(plan.dispatcher));
    if (r.pad_to_capacity && plan.capacity > 0.0)
        return fault("pad_to_capacity", "pad_to_capacity = on: its rows are known, capacity = {} must be none",
                     plan.capacity);
    if (PlanFault found = check_sinkhorn(plan)) return found;
    if (r.forced && !has_experts(plan))
        return fault("balance", "balance = forced: {} has no experts", plan.model->name);
    const auto has_bias = [](const model::LayerKind& kind) { return kind.moe && kind.moe->router.expert_bias; };
    const auto& kinds = plan.model->kinds;
    if (r.bias_update > 0.0 && std::none_of(kinds.begin(), kinds.end(), has_bias))
        return fault("bias_update", "bias_update = {}: the router of {} has no selection bias", r.bias_update,
                     plan.model->name);
    if (r.bias_update > 0.0 && (plan.offload & offload::states) != 0)
        return fault("bias_update", "bias_update = {}: excludes offload = {}, behind which the bias is moved",
                     r.bias_update, offload::to_string(plan.offload & offload::states));
    return {};
}

} // namespace

bool has_experts(const Plan& plan) {
    return std::any_of(plan.model->kinds.begin(), plan.model->kinds.end(),
                       [](const model::LayerKind& kind) { return kind.moe.has_value(); });
}

PlanFault check_choices(const Plan& plan) {
    constexpr std::array rules{check_split_backward, check_precision, check_recompute,   check_offload,
                               check_communication,  check_lora,      check_routed_rows, check_routing,
                               check_router,         check_indexer};
    for (const auto rule : rules) {
        if (PlanFault found = rule(plan)) return found;
    }
    return {};
}

} // namespace moe::plan
