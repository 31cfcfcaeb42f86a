// check_plan: every rule that a plan must keep whatever executes it, in the order in which users meet them.
//
// The rules are those of folded parallelism (arXiv 2504.14960 section 3, arXiv 2603.07685 section 3.3): both factorings
// hold the same ranks with equal pipeline groups, and every axis divides what it splits.
#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/plan_choices.hpp"
#include "planner/plan/plan_limits.hpp"
#include "planner/plan/schedule.hpp"
#include "planner/plan/stack_traits.hpp"

#include <algorithm>
#include <array>
#include <cmath>

namespace moe::plan {
namespace {

// The number `part` must divide `whole`; `counter` names the pair as "whole % part".
PlanFault divides(std::int64_t whole, const char* whole_name, std::int64_t part, const char* part_name,
                  const char* counter) {
    if (whole % part == 0) return {};
    return fault(counter, "{} = {} is not divisible by {} = {}: choose {} from the divisors of {}", whole_name, whole,
                 part_name, part, part_name, whole);
}

PlanFault check_ranges(const Plan& plan) {
    struct Range {
        const char* name;
        std::int64_t value, high;
    };
    const std::array ranges{Range{"seq", plan.seq, limits::max_seq},    Range{"gbs", plan.gbs, limits::max_gbs},
                            Range{"gpus", plan.gpus, limits::max_gpus}, Range{"tp", plan.tp, limits::max_gpus},
                            Range{"cp", plan.cp, limits::max_gpus},     Range{"dp", plan.dp, limits::max_gpus},
                            Range{"pp", plan.pp, limits::max_gpus},     Range{"vpp", plan.vpp, limits::max_gpus},
                            Range{"ep", plan.ep, limits::max_gpus},     Range{"etp", plan.etp, limits::max_gpus},
                            Range{"edp", plan.edp, limits::max_gpus},   Range{"mbs", plan.mbs, limits::max_gbs}};
    for (const Range& range : ranges) {
        if (range.value < 1 || range.value > range.high)
            return fault("range", "{} = {}: must be a whole number from 1 to {}", range.name, range.value, range.high);
    }
    if (plan.mbs * plan.seq > limits::max_micro_batch_tokens)
        return fault("range", "mbs * seq = {} * {}: a micro-batch must not exceed {} tokens", plan.mbs, plan.seq,
                     limits::max_micro_batch_tokens);
    if (!std::isfinite(plan.capacity) ||
        (plan.capacity != 0.0 && (plan.capacity < 1.0 || plan.capacity > limits::most_capacity)))
        return fault("range", "capacity = {}: must be 0 (worst case) or a factor of at least 1", plan.capacity);
    return {};
}

// Products in double: exact for every product that can equal gpus, and without overflow for the others.
PlanFault check_factorings(const Plan& plan) {
    const double dense = static_cast<double>(plan.tp) * plan.cp * plan.dp * plan.pp;
    if (dense != plan.gpus)
        return fault("tp*cp*dp*pp != gpus", "tp * cp * dp * pp = {} * {} * {} * {} = {}, but gpus = {}", plan.tp,
                     plan.cp, plan.dp, plan.pp, dense, plan.gpus);
    const double expert = static_cast<double>(plan.etp) * plan.ep * plan.edp * plan.pp;
    if (expert != plan.gpus)
        return fault("etp*ep*edp*pp != gpus", "etp * ep * edp * pp = {} * {} * {} * {} = {}, but gpus = {}", plan.etp,
                     plan.ep, plan.edp, plan.pp, expert, plan.gpus);
    return {};
}

// Each key head lies on one TP rank or, where there are fewer of them than ranks, on equally many.
PlanFault check_key_heads(const Plan& plan, const model::Attention& attention) {
    const bool several = attention.replicates_keys(plan.tp) && stack_traits(plan).replicates_key_heads;
    if (!several || plan.tp % attention.kv_heads != 0)
        return divides(attention.kv_heads, "num_key_value_heads", plan.tp, "tp", "kv_heads % tp");
    if (plan.tp / attention.kv_heads == key_replicas(plan)) return {};
    return fault(
        "kv_heads % tp",
        "tp = {}: layers of {} and of {} key heads would hold each head on {} and on {} ranks: choose tp from the "
        "divisors of the larger number of heads",
        plan.tp, attention.kv_heads, plan.tp / key_replicas(plan), plan.tp / attention.kv_heads, key_replicas(plan));
}

PlanFault check_attention(const Plan& plan, const model::Attention& attention) {
    if (attention.has_opaque() && attention.opaque.out % plan.tp != 0)
        return fault("heads % tp", "tp = {}: does not divide the {} columns of {} in {}", plan.tp, attention.opaque.out,
                     attention.opaque.name, plan.model->name);
    switch (attention.kind) {
    case model::AttentionKind::gqa:
        if (PlanFault found = divides(attention.heads, "num_attention_heads", plan.tp, "tp", "heads % tp"))
            return found;
        return check_key_heads(plan, attention);
    case model::AttentionKind::mla:
        return divides(attention.heads, "num_attention_heads", plan.tp, "tp", "heads % tp");
    case model::AttentionKind::gated_delta:
        // Value heads are a multiple of them.
        if (attention.key_heads % (plan.tp * plan.cp) != 0)
            return fault("heads % tp cp",
                         "linear_num_key_heads = {} of {} is not divisible by tp * cp = {} * {}: gated delta layers "
                         "trade tokens for heads",
                         attention.key_heads, plan.model->name, plan.tp, plan.cp);
        return {};
    case model::AttentionKind::compressed:
        if (PlanFault found = divides(attention.heads, "num_attention_heads", plan.tp, "tp", "heads % tp"))
            return found;
        return divides(attention.out_groups, "o_groups", plan.tp, "tp", "heads % tp");
    case model::AttentionKind::mamba:
        for (const auto& [heads, name] :
             {std::pair{attention.key_heads, "n_groups"}, std::pair{attention.value_heads, "mamba_num_heads"}})
            if (heads % (plan.tp * plan.cp) != 0)
                return fault("heads % tp cp",
                             "{} = {} of {} is not divisible by tp * cp = {} * {}: Mamba layers trade tokens for heads",
                             name, heads, plan.model->name, plan.tp, plan.cp);
        return {};
    case model::AttentionKind::opaque:
    case model::AttentionKind::none:
        return {};
    }
    return {};
}

PlanFault check_mlp(const Plan& plan, const model::LayerKind& kind) {
    if (!kind.moe) return divides(kind.dense_ffn, "intermediate_size", plan.tp, "tp", "ffn % tp");
    const model::Moe& moe = *kind.moe;
    if (PlanFault found = divides(moe.experts, "experts", plan.ep, "ep", "experts % ep")) return found;
    if (PlanFault found = divides(moe.ffn, "moe_intermediate_size", plan.etp, "etp", "expert ffn % etp")) return found;
    return divides(moe.shared_ffn, "width of the shared experts", plan.tp, "tp", "shared ffn % tp");
}

PlanFault check_layers(const Plan& plan) {
    for (const model::LayerKind& kind : plan.model->kinds) {
        if (PlanFault found = check_attention(plan, kind.attention)) return found;
        if (PlanFault found = check_mlp(plan, kind)) return found;
    }
    if (has_experts(plan) || (plan.ep == 1 && plan.etp == 1)) return {};
    return fault("ep without experts", "ep = {}, etp = {}: {} has no experts, both must be 1", plan.ep, plan.etp,
                 plan.model->name);
}

PlanFault check_batch(const Plan& plan) {
    if (plan.cp > 1 && plan.seq % (2LL * plan.cp) != 0)
        return fault("seq % (2*cp)", "seq = {} is not divisible by 2 * cp = {}: causal halves go to every rank",
                     plan.seq, 2LL * plan.cp);
    const std::int64_t tokens = plan.seq / plan.cp * plan.mbs;
    if (tokens % plan.tp != 0)
        return fault("tokens % tp",
                     "seq / cp * mbs = {} / {} * {} = {} is not divisible by tp = {} (sequence parallelism)", plan.seq,
                     plan.cp, plan.mbs, tokens, plan.tp);
    const std::int64_t together = plan.dp * plan.mbs;
    if (plan.gbs % together != 0)
        return fault("gbs % (dp*mbs)", "gbs = {} is not divisible by dp * mbs = {} * {} = {}: change gbs, dp or mbs",
                     plan.gbs, plan.dp, plan.mbs, together);
    const std::int64_t micro_batches = plan.gbs / together, stages = std::int64_t{plan.pp} * plan.vpp;
    if (micro_batches > limits::max_micro_batches)
        return fault(
            "micro-batches",
            "gbs = {}: makes {} micro-batches of mbs = {} on each of dp = {} ranks, and a step has at most {}: "
            "lower gbs, or raise mbs or the number of GPUs",
            plan.gbs, micro_batches, plan.mbs, plan.dp, limits::max_micro_batches);
    if (micro_batches * stages > limits::max_scheduled)
        return fault(
            "micro-batches",
            "gbs = {}: makes {} micro-batches for pp * vpp = {} * {} stages, {} passes at most: lower gbs, pp or "
            "vpp, or raise mbs or dp",
            plan.gbs, micro_batches, plan.pp, plan.vpp, limits::max_scheduled);
    return {};
}

PlanFault check_split(const Plan& plan) {
    if (!splits_backward(plan.schedule)) return {};
    const char* name = to_string(plan.schedule);
    const bool v = in_a_v(plan.schedule);
    const int chunks = v ? 2 : 1;
    if (plan.pp == 1 || plan.vpp != chunks)
        return fault(fmt::format("{} needs pp > 1, vpp {}", name, chunks).c_str(),
                     "schedule {} needs pp > 1 and vpp {}{}, but pp = {}, vpp = {}", name, chunks,
                     v ? " (the two arms of its V)" : "", plan.pp, plan.vpp);
    if (plan.micro_batches() < chunks * plan.pp)
        return fault("schedule: micro-batches",
                     "schedule {} needs {}pp = {} micro-batches or more, but gbs / (dp * mbs) = {}", name,
                     v ? "2 * " : "", chunks * plan.pp, plan.micro_batches());
    return {};
}

PlanFault check_schedule(const Plan& plan) {
    if (PlanFault found = check_split(plan)) return found;
    const bool interleaved = plan.schedule == ScheduleKind::interleaved;
    if (plan.schedule == ScheduleKind::one_f_one_b && plan.vpp > 1)
        return fault("vpp without interleaved", "vpp = {} needs schedule interleaved, but schedule = {}", plan.vpp,
                     to_string(plan.schedule));
    if (interleaved && (plan.pp == 1 || plan.vpp == 1))
        return fault("interleaved needs pp, vpp > 1",
                     "schedule interleaved needs pp > 1 and vpp > 1, but pp = {}, vpp = {}", plan.pp, plan.vpp);
    if (interleaved && plan.micro_batches() % plan.pp != 0)
        return fault("micro-batches % pp",
                     "gbs / (dp * mbs) = {} micro-batches is not divisible by pp = {}, as interleaved needs",
                     plan.micro_batches(), plan.pp);
    return {};
}

PlanFault check_stages(const Plan& plan) {
    const std::int64_t stage_count = static_cast<std::int64_t>(plan.pp) * plan.vpp;
    const auto layers = static_cast<std::int64_t>(plan.model->layers.size());
    if (plan.layout.empty() && stage_count > layers)
        return fault("pp*vpp > layers",
                     "pp * vpp = {} * {} = {} stages, but {} has {}: use fewer stages or give a layout", plan.pp,
                     plan.vpp, stage_count, plan.model->name, counted(layers, "layer"));
    const auto& kinds = plan.model->kinds;
    const bool together = std::any_of(kinds.begin(), kinds.end(),
                                      [](const model::LayerKind& kind) { return kind.attention.shares_index; });
    if (plan.layout.empty() && !together) return {};
    try {
        for (const Stage& stage : stages(plan))
            if (stage.first_layer > 0 && stage.layers > 0 && !may_begin_stage(*plan.model, stage.first_layer))
                return fault("layout: shared keys",
                             "a stage begins with layer {} of {}, which shares the keys that an earlier layer picks: "
                             "begin it with one that has an indexer",
                             stage.first_layer, plan.model->name);
    } catch (const Error& error) {
        return {"layout", error.what()};
    }
    return {};
}

PlanFault check_rank_order(const Plan& plan) {
    if (plan.rank_order == Plan{}.rank_order)
        return {}; // With pp outermost the pipeline groups of both factorings are equal.
    try {
        const Mesh mesh(plan);
    } catch (const Error& error) {
        return {"rank_order", error.what()};
    }
    return {};
}

} // namespace

PlanFault check_degrees(const Plan& plan) {
    if (plan.model == nullptr || plan.model->layers.empty()) return fault("model", "the plan has no model");
    if (plan.hardware == nullptr) return fault("hardware", "the plan has no hardware");
    constexpr std::array rules{check_ranges,   check_factorings, check_layers,    check_batch,
                               check_schedule, check_stages,     check_rank_order};
    for (const auto rule : rules) {
        if (PlanFault found = rule(plan)) return found;
    }
    return {};
}

PlanFault check_plan(const Plan& plan) {
    if (PlanFault found = check_degrees(plan)) return found;
    return check_choices(plan);
}

} // namespace moe::plan
