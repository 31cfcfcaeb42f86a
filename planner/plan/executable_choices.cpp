// What execute cannot run: choices of a plan that the simulator alone knows.
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/plan_choices.hpp"
#include "planner/plan/stack_traits.hpp"

#include <array>
#include <vector>

namespace moe::plan {

// Kernels of FP8 products take 16 bytes at a time, so that every width of theirs must be a multiple of 16.
PlanFault check_fp8_widths(const Plan& plan) {
    struct Width {
        const char* name;
        std::int64_t elements;
    };
    std::vector<Width> widths{{"hidden_size", plan.model->hidden}};
    for (const model::LayerKind& kind : plan.model->kinds) {
        const model::Attention& a = kind.attention;
        const std::int64_t heads = a.heads / plan.tp;
        widths.push_back({"width of the attention's output per rank", heads * a.v_dim});
        if (a.kind == model::AttentionKind::gqa)
            widths.push_back({"width of queries, keys and values per rank",
                              heads * a.qk_dim + a.key_heads_of(plan.tp) * (a.qk_dim + (a.k_eq_v ? 0 : a.v_dim))});
        if (a.kind == model::AttentionKind::mla)
            widths.insert(widths.end(),
                          {{"q_lora_rank", a.q_lora},
                           {"kv_lora_rank", a.kv_lora},
                           {"width of the rotary key", a.rope_dim},
                           {"width of queries per rank", heads * a.qk_dim},
                           {"width of keys and values per rank", heads * (a.qk_dim - a.rope_dim + a.v_dim)}});
        if (a.kind == model::AttentionKind::gated_delta || a.kind == model::AttentionKind::mamba) {
            const std::int64_t keys = std::int64_t{a.key_heads} * a.key_dim,
                               values = std::int64_t{a.value_heads} * a.value_dim,
                               gates = (a.kind == model::AttentionKind::mamba ? 1 : 2) * std::int64_t{a.value_heads};
            widths.insert(widths.end(),
                          {{"width of a state's projection per rank", (2 * (keys + values) + gates) / plan.tp},
                           {"width of a state's output per rank", values / plan.tp}});
        }
        if (kind.dense()) widths.push_back({"width of the MLP per rank", kind.dense_ffn / plan.tp});
        if (kind.moe) widths.push_back({"width of an expert per rank", kind.moe->ffn / plan.etp});
        if (kind.moe) widths.push_back({"moe_latent_size", kind.moe->latent});
        if (kind.moe) widths.push_back({"width of the shared experts per rank", kind.moe->shared_ffn / plan.tp});
    }
    for (const Width& width : widths)
        if (width.elements % 16 != 0)
            return fault("fp8 widths",
                         "precision = fp8-blockwise: the {} is {}, products in FP8 take multiples of 16: "
                         "use another degree or --precision bf16",
                         width.name, width.elements);
    return {};
}

namespace {

PlanFault check_executable_precision(const Plan& plan) {
    const auto runs = [&plan](machine::Precision p) {
        const machine::Precision in = plan.computed_in(p);
        return in <= machine::Precision::bf16 || in == machine::Precision::fp8_blockwise;
    };
    struct Choice {
        const char* field;
        machine::Precision precision;
    };
    const std::array choices{Choice{"precision", plan.precision}, Choice{"attention_precision", plan.core_attention()},
                             Choice{"expert_precision", plan.experts()}, Choice{"head_precision", plan.head()}};
    if (plan.core_attention() > machine::Precision::bf16)
        return fault("attention_precision", "attention_precision = {}: execute has fp32 and bf16 there: use default",
                     machine::to_string(plan.core_attention()));
    bool fp8 = false;
    for (const auto& [field, precision] : choices) {
        if (!runs(precision) || (precision == machine::Precision::fp32) != (plan.precision == machine::Precision::fp32))
            return fault(field,
                         "{} = {}: execute has fp32 throughout, or bf16 and fp8-blockwise, and with stack moe-plan "
                         "fp8-tensor and the values of mxfp8 and nvfp4",
                         field, machine::to_string(precision));
        fp8 = fp8 || precision == machine::Precision::fp8_blockwise;
    }
    if (!fp8) return {};
    if ((plan.offload & offload::states) != 0)
        return fault("offload",
                     "offload = {}: weights of fp8-blockwise are quantized from their masters as a step begins, which "
                     "must lie on the device: leave {} out",
                     offload::to_string(plan.offload), offload::to_string(plan.offload & offload::states));
    if (key_replicas(plan) > 1)
        return fault(
            "precision",
            "precision = fp8-blockwise: tp = {} is above the {} key heads of {}, whose products are apart from "
            "those of queries and have no FP8: use --precision bf16 or a tp of at most {}",
            plan.tp, plan.tp / key_replicas(plan), plan.model->name, plan.tp / key_replicas(plan));
    return check_fp8_widths(plan);
}

// Conditions of dispatch over peer memory: a warp holds all that there is to know of a token, and 16 bytes move at a
// time. An EP group that no memory joins is dispatched in two levels (expert_inner()).
PlanFault check_over_peers(const Plan& plan) {
    constexpr int most_choices = 24, most_experts = 896;
    if (plan.dispatcher != Dispatcher::hybridep || plan.ep * plan.etp == 1) return {};
    const auto refused = [](const std::string& why) {
        return fault("dispatcher", "dispatcher = hybridep: {}: set dispatcher=alltoall", why);
    };
    if (plan.etp > 1) return refused(fmt::format("etp = {}, experts must be whole", plan.etp));
    for (const model::LayerKind& kind : plan.model->kinds) {
        if (!kind.moe) continue;
        if (kind.moe->top_k > most_choices || kind.moe->experts > most_experts)
            return refused(fmt::format("{} of {} experts per token, at most {} of {} are supported", kind.moe->top_k,
                                       kind.moe->experts, most_choices, most_experts));
    }
    if (plan.model->hidden % 8 != 0) return refused(fmt::format("width {} is no multiple of 8", plan.model->hidden));
    return {};
}

// FSDP by our own ops: published stacks state what theirs moves, not where zeros and sums are.
PlanFault check_resharding(const Plan& plan) {
    if (!plan.reshards()) return {};
    if (!stack_traits(plan).adds_to_shards)
        return fault("fsdp", "fsdp = on of stack \"{}\" is not supported: search again with --stack moe-plan",
                     plan.stack);
    for (const machine::Precision precision : {plan.precision, plan.experts(), plan.head()})
        if (precision == machine::Precision::fp8_blockwise)
            return fault("fsdp",
                         "fsdp = on is not supported with fp8-blockwise, whose matrices are quantized one by one where "
                         "they stay: set fsdp=off or precision=bf16");
    return {};
}

} // namespace

PlanFault check_executable(const Plan& plan) {
    if (PlanFault found = check_executable_precision(plan)) return found;
    struct Choice {
        bool made;
        const char* field;
        std::string value, otherwise;
    };
    const std::array choices{
        Choice{plan.dispatcher == Dispatcher::deepep, "dispatcher", "deepep", "hybridep"},
        Choice{plan.dispatcher == Dispatcher::ncclep, "dispatcher", "ncclep", "hybridep"},
        Choice{plan.gradients != machine::Precision::fp32 && !stack_traits(plan).reduces_bf16_copy, "gradients",
               machine::to_string(plan.gradients), "fp32"},
        Choice{plan.paged_stash, "paged_stash", "on", "off"},
        // One queue of a GPU hides nothing.
        Choice{plan.tp_overlap && !plan.hardware->cpu, "tp_overlap", "on", "off"},
    };
    for (const auto& [made, field, value, otherwise] : choices)
        if (made) return fault(field, "{} = {} is not supported: set {}={}", field, value, field, otherwise);
    if (PlanFault found = check_resharding(plan)) return found;
    return check_over_peers(plan);
}

} // namespace moe::plan
