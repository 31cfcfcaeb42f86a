// Alpha-beta formulas of the collectives and the expected copies of token-based dispatch.
#include "simulator/cost/collective.hpp"

#include "planner/plan/mesh.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/routing.hpp"
#include "planner/stack/stack.hpp"

#include <algorithm>
#include <cmath>
#include <tuple>

namespace moe::cost {

const Routes::Set& Routes::of(const Placement& placement) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto it = sets_.find(placement);
    if (it != sets_.end()) return it->second;
    Set set;
    if (placement.size > 1) {
        set.exchange = exchange_route(hardware_, placement);
        set.ring = ring_route(hardware_, placement);
        set.pair = pair_route(hardware_, placement);
        if (placement.nodes > 1) set.domains = domain_route(hardware_, placement);
    }
    return sets_.emplace(placement, set).first->second;
}

namespace {

Placement find_placement(const plan::Plan& plan, plan::Group group) {
    const int domain = domain_of_job(*plan.hardware, plan.gpus), node = node_of_job(*plan.hardware, plan.gpus);
    const plan::Mesh mesh(plan);
    const auto worse = [](const Placement& a, const Placement& b) {
        return std::tuple(a.nodes, a.domains, -a.per_domain) > std::tuple(b.nodes, b.domains, -b.per_domain);
    };
    std::vector<int> ranks = mesh.members(group, 0);
    if (group.axes == plan::axis::pipeline) {
        Placement worst{2, 1, 2};
        for (std::size_t i = 0; i + 1 < ranks.size(); ++i)
            if (const Placement p = place({ranks[i], ranks[i + 1]}, domain, node); worse(p, worst)) worst = p;
        return worst;
    }
    Placement worst = place(ranks, domain, node);
    // Every pipeline rank's group lies like rank 0's when stages nest with domains and nodes.
    const int stage = plan.stage_ranks();
    const auto nests = [stage](int unit) { return stage % unit == 0 || unit % stage == 0; };
    if (nests(domain) && nests(node)) return worst;
    // A group's placement depends on where in a node it begins.
    for (const int first : mesh.first_members(group, node)) {
        const int shift = first - ranks.front();
        for (int& rank : ranks) rank += shift;
        if (const Placement p = place(ranks, domain, node); worse(p, worst)) worst = p;
    }
    return worst;
}

} // namespace

Placement Routes::placement(const plan::Plan& plan, plan::Group group) const {
    const GroupKey key{{plan.gpus, plan.tp, plan.cp, plan.dp, plan.pp, plan.ep, plan.etp, plan.edp, plan.fsdp_replicas,
                        plan::key_replicas(plan), plan::expert_inner(plan), static_cast<int>(group.domain), group.axes},
                       plan.rank_order};
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto known = placements_.find(key);
        if (known != placements_.end()) return known->second;
    }
    const Placement found = find_placement(plan, group);
    const std::lock_guard<std::mutex> lock(mutex_);
    placements_.emplace(key, found);
    return found;
}

namespace {

// Latency of the n-1 steps of a ring: most stay inside a domain, one per further domain leaves it and one per further
// node crosses the fabric.
double ring_latency(const GroupLinks& g) {
    const int crossings = g.placement.domains - 1, over_nics = g.placement.nodes - 1;
    return over_nics * g.nic.latency + (g.placement.size - 1 - crossings) * g.nvlink.latency +
           (crossings - over_nics) * g.pcie.latency;
}

double tree_latency(const GroupLinks& g) {
    const auto depth = [](int members) { return std::ceil(std::log2(std::max(1, members))); };
    return depth(g.placement.per_domain) * g.nvlink.latency + depth(g.placement.nodes) * g.nic.latency +
           depth(g.placement.domains_per_node()) * g.pcie.latency;
}

double gather_seconds(const GroupLinks& g, double bytes) {
    if (g.placement.size <= 1) return 0.0;
    const double wire = bytes * (g.placement.size - 1) / g.placement.size / (g.routes.ring.bandwidth * g.efficiency);
    return std::min(ring_latency(g) + wire, tree_latency(g) + 2.0 * wire);
}

} // namespace

double all_gather_seconds(const GroupLinks& group, double bytes) { return gather_seconds(group, bytes); }
double reduce_scatter_seconds(const GroupLinks& group, double bytes) { return gather_seconds(group, bytes); }
double all_reduce_seconds(const GroupLinks& group, double bytes) { return 2.0 * gather_seconds(group, bytes); }

double all_to_all_seconds(const GroupLinks& g, double bytes) {
    if (g.placement.size <= 1) return 0.0;
    const double sent = bytes * (g.placement.size - 1) / g.placement.size;
    const int over_nics = g.placement.nodes > 1 ? g.placement.size - g.placement.per_node : 0;
    return g.routes.exchange.latency + over_nics * g.nic.message + sent / (g.routes.exchange.bandwidth * g.efficiency);
}

double ring_step_seconds(const GroupLinks& g, double bytes) {
    if (g.placement.size <= 1) return 0.0;
    // The slowest hop sets the pace of the ring; between nodes it is one NIC.
    const machine::Link& slowest = g.placement.nodes > 1 ? g.nic : g.placement.domains > 1 ? g.pcie : g.nvlink;
    return g.routes.ring.latency + bytes / (slowest.bandwidth * g.efficiency);
}

double pair_seconds(const GroupLinks& g, double bytes) {
    if (g.placement.size <= 1) return 0.0;
    return g.routes.pair.latency + bytes / (g.routes.pair.bandwidth * g.efficiency);
}

double token_exchange_seconds(const GroupLinks& g, const stack::LinkShares& shares, double copy_bytes,
                              const model::Moe& moe, int groups) {
    if (g.placement.size <= 1) return 0.0;
    const int n = g.placement.size, domains = g.placement.domains, nodes = g.placement.nodes;
    const double ranks = plan::distinct_destinations(moe.experts, moe.top_k, n * groups, moe.router);
    double seconds = 0.0;
    if (g.placement.per_domain > 1) {
        const double remote = static_cast<double>(g.placement.per_domain - 1) / g.placement.per_domain;
        seconds = copy_bytes * ranks * remote / (g.nvlink.bandwidth * shares.nvlink);
    }
    // Copies to that many parts of the group, less what stays in the part where the token is.
    const auto sent = [&](int parts, int apart) {
        const double copies = plan::distinct_destinations(moe.experts, moe.top_k, parts, moe.router);
        return copy_bytes * copies * (apart - 1) / apart;
    };
    if (domains > nodes)
        seconds = std::max(seconds, sent(domains, g.placement.domains_per_node()) / (g.pcie.bandwidth * shares.nic));
    if (nodes > 1) seconds = std::max(seconds, sent(nodes, nodes) / (g.routes.domains.bandwidth * shares.nic));
    return shares.start + g.routes.exchange.latency + seconds;
}

} // namespace moe::cost
