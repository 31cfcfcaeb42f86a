// What excludes a plan of the space: its degrees alone, or every choice that could stand beside them.
//
// A pinned field may need another that search chooses (delayed weight gradients need communication, a stash of pages a
// planned capacity). So a mapping is excluded only when no combination of the searched fields goes with what is pinned.
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan_choices.hpp"
#include "planner/search/search_space.hpp"
#include "planner/stack/stack.hpp"

#include <algorithm>
#include <utility>

namespace moe::search {
namespace {

// The plan with the options and the optimizer of a root.
plan::Plan with_choices_of(const plan::Plan& root, const plan::Plan& plan) {
    plan::Plan other = root;
    other.precision = plan.precision;
    other.tp = plan.tp;
    other.cp = plan.cp;
    other.ep = plan.ep;
    other.etp = plan.etp;
    other.pp = plan.pp;
    other.dp = plan.dp;
    other.edp = plan.edp;
    other.vpp = plan.vpp;
    other.mbs = plan.mbs;
    other.layout = plan.layout;
    other.schedule = plan.schedule;
    return other;
}

} // namespace

plan::PlanFault SearchSpace::fault_of(const plan::Plan& plan) const {
    if (plan::PlanFault fault = plan::check_plan(plan)) return fault;
    return stack::check_stack(plan, stack_);
}

plan::PlanFault SearchSpace::fault_of(const plan::Plan& plan, std::size_t root) const {
    if (plan::PlanFault fault = plan::check_plan(plan)) return fault;
    return stack::check_stack(plan, stack_,
                              open_rules_[degrees_above_one(plan.tp, plan.cp, plan.ep, plan.etp, plan.pp)][root]);
}

plan::PlanFault SearchSpace::fault_of_degrees(const plan::Plan& plan) const { return plan::check_degrees(plan); }

plan::PlanFault SearchSpace::fault_of_choices(const plan::Plan& plan) const {
    if (plan::PlanFault fault = plan::check_choices(plan)) return fault;
    return stack::check_stack(plan, stack_);
}

plan::PlanFault SearchSpace::settle(plan::Plan& plan) const {
    if (plan::PlanFault fault = fault_of_degrees(plan)) return fault;
    return settle_choices(plan);
}

// Nothing that search chooses beside them makes up for a precision, a degree or a model that stack or machine lack.
bool SearchSpace::offered(const plan::Plan& plan) const {
    const auto& known = stack_.precisions;
    return base_.hardware->peak_flops[static_cast<std::size_t>(plan.computed_in(plan.precision))] > 0.0 &&
           std::find(known.begin(), known.end(), plan.precision) != known.end() &&
           (!stack_.executable || base_.model->not_executable.empty()) && (plan.tp == 1 || stack_.tensor) &&
           (plan.cp == 1 || stack_.context) && (plan.etp == 1 || stack_.expert_tensor) &&
           (plan.vpp == 1 || stack_.interleaved);
}

plan::PlanFault SearchSpace::settle_choices(plan::Plan& plan) const {
    plan::PlanFault fault = fault_of_choices(plan);
    if (!fault || !offered(plan)) return fault;
    std::vector<unsigned> sets{plan.recompute};
    if (plan.recompute != 0 && !pinned("recompute")) sets.push_back(0);
    for (const unsigned set : sets)
        for (const plan::Plan& root : roots(plan.tp, plan.cp, plan.ep, plan.etp, plan.pp)) {
            plan::Plan other = with_choices_of(root, plan);
            other.recompute = set;
            if (fault_of_choices(other)) continue;
            plan = std::move(other);
            return {};
        }
    return fault;
}

// The reasons why degrees are impossible, one for each micro-batch size; none when they are possible with some size.
// One chunk per rank is the mildest case of the rules about chunks, so degrees that fail there fail everywhere.
std::vector<plan::PlanFault> SearchSpace::faults(plan::Plan plan) const {
    plan.vpp = 1;
    plan.schedule = plan::ScheduleKind::one_f_one_b;
    plan.layout.clear();
    plan.rank_order = plan::Plan{}.rank_order;
    std::vector<plan::PlanFault> result;
    for (const std::int64_t mbs : micro_batch_sizes(plan.dp)) {
        plan.mbs = mbs;
        plan::PlanFault fault = fault_of_degrees(plan);
        if (!fault) return {};
        result.push_back(std::move(fault));
    }
    return result;
}

// Why no choices go with a mapping: those that are pinned exclude each other or its degrees, whatever the others are.
plan::PlanFault SearchSpace::fault_of_mapping(const LayerOptions& family, const ParallelConfig& mapping) {
    const auto [known, fresh] =
        known_faults_.try_emplace({family.precision, family.tp, family.cp, family.ep, family.etp, mapping.pp > 1,
                                   mapping.dp > 1, mapping.edp > 1});
    if (!fresh) return known->second;
    const std::vector<int> chunks = chunk_counts(mapping.pp);
    for (const int vpp : {chunks.front(), chunks.back()}) {
        plan::Plan plan = candidate(family, mapping, vpp, micro_batch_sizes(mapping.dp).front());
        plan::PlanFault fault = settle_choices(plan);
        if (!fault) return known->second = {};
        if (!known->second) known->second = std::move(fault);
    }
    return known->second;
}

} // namespace moe::search
