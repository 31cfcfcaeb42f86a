// Candidates: the plan that one stands for, their order, and how many a branch has.
#include "planner/search/search_branch.hpp"

#include <tuple>

namespace moe {

Plan plan_of(const SearchSpace& space, const Candidate& c) {
    const Family& f = *c.family;
    const Mapping& mapping = *c.shape.mapping;
    Plan plan = space.roots(f.tp, f.cp, f.ep, f.etp, mapping.pp)[c.root];
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
    plan.layout = c.shape.cut->layout;
    if (!space.pinned("schedule"))
        plan.schedule = c.shape.vpp > 1 ? ScheduleKind::interleaved : ScheduleKind::one_f_one_b;
    plan.recompute = space.recompute_sets()[c.set];
    plan.optimizer = space.optimizers()[c.optimizer];
    return plan;
}

MappingKey mapping_of(const Candidate& c) {
    return {c.family->tp, c.family->cp, c.shape.mapping->dp, c.shape.mapping->pp, c.family->ep, c.family->etp};
}

bool sooner(const Candidate& a, const Candidate& b) {
    const auto key = [](const Candidate& c) {
        return std::tie(c.seconds, c.family->precision, c.family->tp, c.family->cp, c.family->ep, c.family->etp,
                        c.shape.mapping->pp, c.shape.vpp, c.mbs, c.shape.cut->layout, c.root, c.set, c.optimizer);
    };
    return key(a) < key(b);
}

double least_seconds(double quoted) { return quoted * (1.0 - quote_time_margin); }

std::int64_t candidates_of(const SearchSpace& space, const Branch& branch, std::size_t roots) {
    return static_cast<std::int64_t>(branch.divided.size() * roots * space.recompute_sets().size() *
                                     space.optimizers().size());
}

} // namespace moe
