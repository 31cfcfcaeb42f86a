// Candidates: the plan that one stands for, their order, how many a branch has, and what their sets recompute.
#include "planner/search/search_branch.hpp"

#include <algorithm>
#include <tuple>

namespace moe::search {

plan::Plan plan_of(const SearchSpace& space, const Candidate& c) {
    const LayerOptions& f = *c.layer_options;
    const ParallelConfig& mapping = *c.shape.parallel_config;
    plan::Plan plan = space.roots(f.tp, f.cp, f.ep, f.etp, mapping.pp)[c.root];
    plan.precision = f.precision;
    plan.tp = f.tp;
    plan.cp = f.cp;
    plan.ep = f.ep;
    plan.etp = f.etp;
    plan.pp = mapping.pp;
    plan.dp = mapping.dp;
    plan.edp = mapping.edp;
    plan.vpp = c.shape.vpp;
    plan.mbs = c.mbs;
    plan.layout = c.shape.stage_split->layout;
    if (!space.pinned("schedule"))
        plan.schedule = c.shape.vpp > 1 ? plan::ScheduleKind::interleaved : plan::ScheduleKind::one_f_one_b;
    plan.recompute = space.recompute_sets()[c.set];
    plan.optimizer = space.optimizer(plan, c.optimizer);
    return plan;
}

ParallelConfigKey parallel_config_of(const Candidate& c) {
    return {c.layer_options->tp,
            c.layer_options->cp,
            c.shape.parallel_config->dp,
            c.shape.parallel_config->pp,
            c.layer_options->ep,
            c.layer_options->etp,
            c.mbs};
}

bool sooner(const Candidate& a, const Candidate& b) {
    const auto key = [](const Candidate& c) {
        return std::tie(c.seconds, c.layer_options->precision, c.layer_options->tp, c.layer_options->cp,
                        c.layer_options->ep, c.layer_options->etp, c.shape.parallel_config->pp, c.shape.vpp, c.mbs,
                        c.shape.stage_split->layout, c.root, c.set, c.optimizer);
    };
    return key(a) < key(b);
}

double least_seconds(double bound) { return bound * (1.0 - bound_time_margin); }

unsigned covered(const SearchSpace& space, std::size_t set) {
    unsigned modules = space.recompute_sets()[set];
    if ((modules & plan::recompute::full) != 0) modules = ~0U;
    if ((modules & plan::recompute::moe) != 0) modules |= plan::recompute::moe_act | plan::recompute::shared_experts;
    return modules;
}

std::optional<std::size_t> largest_of(const SearchSpace& space, const std::vector<std::size_t>& sets) {
    for (const std::size_t set : sets)
        if (std::all_of(sets.begin(), sets.end(),
                        [&](std::size_t other) { return (covered(space, other) & ~covered(space, set)) == 0; }))
            return set;
    return std::nullopt;
}

std::int64_t candidates_of(const SearchSpace& space, const SearchNode& branch, std::size_t roots) {
    return static_cast<std::int64_t>(branch.divided.size() * roots * space.recompute_sets().size() *
                                     space.optimizers().size());
}

} // namespace moe::search
