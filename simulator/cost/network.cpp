// Builds the link graph of a group with Boost.Graph, routes its messages and finds the fullest link of one member.
#include "simulator/cost/network.hpp"

#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/plan/plan.hpp"

#include <boost/graph/adjacency_list.hpp>
#include <boost/graph/breadth_first_search.hpp>
#include <boost/graph/visitors.hpp>

#include <algorithm>
#include <map>
#include <utility>

namespace moe::cost {
namespace {

struct LinkProperty {
    double latency = 0.0, bandwidth = 0.0;
};
using Graph = boost::adjacency_list<boost::vecS, boost::vecS, boost::directedS, boost::no_property, LinkProperty>;
using Vertex = boost::graph_traits<Graph>::vertex_descriptor;

struct Flow {
    int to = 0;         // member
    double share = 0.0; // of the bytes that the member sends
};

// Vertices: members' GPUs, their PCIe ports, their NICs, one switch per domain, one PCIe root per node, one fabric. A
// GPU's port carries what it sends to other domains of its node and to its NIC.
class Links {
public:
    Links(const machine::Hardware& hardware, const Placement& placement)
        : placement_(placement),
          graph_(static_cast<std::size_t>(3 * placement.size + placement.domains + placement.nodes + 1)) {
        const auto n = static_cast<std::size_t>(placement.size);
        const auto domains = static_cast<std::size_t>(placement.domains);
        const Vertex roots = 3 * n + domains, fabric = roots + static_cast<std::size_t>(placement.nodes);
        for (std::size_t i = 0; i < n; ++i) {
            const Vertex port = n + i, nic = 2 * n + i;
            // A message crosses two links of its tier, so each carries half of the tier's latency.
            both_ways(i, 3 * n + unit(i, placement.per_domain, placement.domains), hardware.nvlink.latency / 2,
                      hardware.nvlink.bandwidth);
            both_ways(i, port, 0.0, hardware.pcie.bandwidth > 0.0 ? hardware.pcie.bandwidth : hardware.nic.bandwidth);
            both_ways(port, roots + unit(i, placement.per_node, placement.nodes), hardware.pcie.latency / 2,
                      hardware.pcie.bandwidth);
            both_ways(port, nic, 0.0, hardware.nic.bandwidth);
            both_ways(nic, fabric, hardware.nic.latency / 2, hardware.nic.bandwidth);
        }
    }

    // The rate and latency of the flows that leave `source`, when every member sends alike. Links beyond the source's
    // own carry the same sum by symmetry, so only its own are added up. A message takes the path of fewest links:
    // through its domain's switch where that reaches, whatever the latencies, else through its node's PCIe root, else
    // through its own NIC.
    Route send(int source, const std::vector<Flow>& flows) const {
        std::vector<Vertex> previous(boost::num_vertices(graph_));
        for (Vertex v = 0; v < previous.size(); ++v) previous[v] = v;
        boost::breadth_first_search(graph_, static_cast<Vertex>(source),
                                    boost::visitor(boost::make_bfs_visitor(
                                        boost::record_predecessors(previous.data(), boost::on_tree_edge()))));
        std::map<std::pair<Vertex, Vertex>, double> load;
        Route route{0.0, 0.0};
        for (const Flow& flow : flows) {
            double latency = 0.0;
            for (Vertex v = static_cast<Vertex>(flow.to); v != static_cast<Vertex>(source); v = previous[v]) {
                latency += link(previous[v], v).latency;
                if (own(source, previous[v])) load[{previous[v], v}] += flow.share;
            }
            route.latency = std::max(route.latency, latency);
        }
        double seconds_per_byte = 0.0;
        for (const auto& [ends, share] : load)
            seconds_per_byte = std::max(seconds_per_byte, share / link(ends.first, ends.second).bandwidth);
        route.bandwidth = seconds_per_byte > 0.0 ? 1.0 / seconds_per_byte : 0.0;
        return route;
    }

private:
    const LinkProperty& link(Vertex from, Vertex to) const { return graph_[boost::edge(from, to, graph_).first]; }
    // The domain or node of a member, which are filled one after the other.
    static std::size_t unit(std::size_t member, int per_unit, int units) {
        return std::min(member / static_cast<std::size_t>(per_unit), static_cast<std::size_t>(units) - 1);
    }
    // The source itself, its port and its NIC.
    bool own(int source, Vertex from) const {
        const auto n = static_cast<Vertex>(placement_.size);
        return from < 3 * n && from % n == static_cast<Vertex>(source);
    }
    void both_ways(Vertex a, Vertex b, double latency, double bandwidth) {
        boost::add_edge(a, b, LinkProperty{latency, bandwidth}, graph_);
        boost::add_edge(b, a, LinkProperty{latency, bandwidth}, graph_);
    }

    Placement placement_;
    Graph graph_;
};

void check(const machine::Hardware& hardware, const Placement& placement) {
    if (placement.per_domain > 1 && !(hardware.nvlink.bandwidth > 0.0))
        refuse("hardware {}: nvlink.bandwidth is {}, but a group has {} members in one domain", hardware.name,
               hardware.nvlink.bandwidth, placement.per_domain);
    if (placement.per_node > placement.per_domain && !(hardware.pcie.bandwidth > 0.0))
        refuse("hardware {}: pcie.bandwidth is {}, but a group has {} members in one node of several NVLink domains",
               hardware.name, hardware.pcie.bandwidth, placement.per_node);
    if (placement.nodes > 1 && !(hardware.nic.bandwidth > 0.0))
        refuse("hardware {}: nic.bandwidth is {}, but a group spans {} {}: give the NIC's rate", hardware.name,
               hardware.nic.bandwidth, placement.nodes,
               placement.nodes == placement.domains ? "NVLink domains" : "nodes");
}

} // namespace

int node_of_job(const machine::Hardware& hardware, int gpus) {
    const int domain = domain_of_job(hardware, gpus);
    if (!(hardware.pcie.bandwidth > 0.0)) return domain;
    int node = std::max(domain, std::min(hardware.gpus_per_node, gpus) / domain * domain);
    while (gpus % node != 0) node -= domain;
    return node;
}

namespace {

// Units of so many ranks that members touch, and the members in the fullest.
std::pair<int, int> spread(const std::vector<int>& members, int unit) {
    int units = 0, fullest = 1, here = -1, count = 0;
    for (const int rank : members) {
        const int in = rank / std::max(1, unit);
        count = in == here ? count + 1 : 1;
        units += in == here ? 0 : 1;
        fullest = std::max(fullest, count);
        here = in;
    }
    return {units, fullest};
}

} // namespace

Placement place(const std::vector<int>& members, int domain, int node) {
    const auto [domains, per_domain] = spread(members, domain);
    const auto [nodes, per_node] = spread(members, std::max(domain, node));
    return {static_cast<int>(members.size()), domains, per_domain, nodes, per_node};
}

std::string unpriced(const plan::Plan& plan) {
    if (plan.hardware == nullptr || !(plan.hardware->nic.message > 0.0) || plan.ep == 1 ||
        plan.dispatcher == plan::Dispatcher::alltoall || plan.ep * plan.etp <= node_of_job(*plan.hardware, plan.gpus))
        return {};
    return fmt::format("dispatcher {}: over the network of {} a proxy on the host sends its messages, which is not "
                       "priced: expect less, or set dispatcher alltoall",
                       plan::to_string(plan.dispatcher), plan.hardware->name);
}

Route exchange_route(const machine::Hardware& hardware, const Placement& placement) {
    check(hardware, placement);
    const Links links(hardware, placement);
    const int last = placement.size - 1; // lies in the least full domain, so it sends most over its NIC
    std::vector<Flow> flows;
    for (int to = 0; to < last; ++to) flows.push_back({to, 1.0 / last});
    return links.send(last, flows);
}

Route ring_route(const machine::Hardware& hardware, const Placement& placement) {
    check(hardware, placement);
    const Links links(hardware, placement);
    if (placement.domains == 1) return links.send(0, {{1, 1.0}});
    // Of all rings, one in per_node leaves the node here and one in per_domain the domain.
    const double rings = placement.per_domain, over_nics = placement.nodes > 1 ? 1.0 / placement.per_node : 0.0;
    std::vector<Flow> flows;
    if (placement.nodes > 1) flows.push_back({placement.per_node, over_nics});
    if (placement.domains > placement.nodes) flows.push_back({placement.per_domain, 1.0 / rings - over_nics});
    if (placement.per_domain > 1) flows.push_back({1, (rings - 1.0) / rings});
    return links.send(0, flows);
}

Route pair_route(const machine::Hardware& hardware, const Placement& placement) {
    check(hardware, placement);
    return Links(hardware, placement).send(0, {{placement.size - 1, 1.0}});
}

Route domain_route(const machine::Hardware& hardware, const Placement& placement) {
    check(hardware, placement);
    const Links links(hardware, placement);
    std::vector<Flow> flows;
    for (int node = 1; node < placement.nodes; ++node)
        flows.push_back({std::min(node * placement.per_node, placement.size - 1), 1.0 / (placement.nodes - 1)});
    return links.send(0, flows);
}

} // namespace moe::cost
