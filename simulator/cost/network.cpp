// Builds the link graph of a group with Boost.Graph, routes its messages and finds the fullest link of one member.
#include "simulator/cost/network.hpp"

#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"

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

// Vertices: members' GPUs, their NICs, one switch per domain, one fabric.
class Links {
public:
    Links(const machine::Hardware& hardware, const Placement& placement)
        : placement_(placement), graph_(static_cast<std::size_t>(2 * placement.size + placement.domains + 1)) {
        const auto n = static_cast<std::size_t>(placement.size);
        const auto domains = static_cast<std::size_t>(placement.domains);
        const Vertex fabric = 2 * n + domains;
        for (std::size_t i = 0; i < n; ++i) {
            const Vertex nic = n + i, hub = 2 * n + static_cast<std::size_t>(domain(static_cast<int>(i)));
            // A message crosses two links of its tier, so each carries half of the tier's latency.
            both_ways(i, hub, hardware.nvlink.latency / 2, hardware.nvlink.bandwidth);
            both_ways(i, nic, 0.0, hardware.nic.bandwidth);
            both_ways(nic, fabric, hardware.nic.latency / 2, hardware.nic.bandwidth);
        }
    }

    int domain(int member) const { return std::min(member / placement_.per_domain, placement_.domains - 1); }

    // The rate and latency of the flows that leave `source`, when every member sends alike. Links beyond the source's
    // own carry the same sum by symmetry, so only its own are added up. A message takes the path of fewest links:
    // through its domain's switch where that reaches, whatever the latencies, else through its own NIC.
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
    bool own(int source, Vertex from) const {
        return from == static_cast<Vertex>(source) || from == static_cast<Vertex>(placement_.size + source);
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
    if (placement.domains > 1 && !(hardware.nic.bandwidth > 0.0))
        refuse("hardware {}: nic.bandwidth is {}, but a group spans {} NVLink domains: give the NIC's rate",
               hardware.name, hardware.nic.bandwidth, placement.domains);
}

} // namespace

int domain_of_job(const machine::Hardware& hardware, int gpus) {
    int domain = std::max(1, std::min(hardware.nvlink_domain_used, gpus));
    if (gpus <= hardware.nvlink_domain) return gpus;
    while (gpus % domain != 0) --domain;
    return domain;
}

Placement place(const std::vector<int>& members, int domain) {
    Placement placement{static_cast<int>(members.size()), 0, 1};
    int here = -1, count = 0;
    for (const int rank : members) {
        const int in = rank / std::max(1, domain);
        count = in == here ? count + 1 : 1;
        placement.domains += in == here ? 0 : 1;
        placement.per_domain = std::max(placement.per_domain, count);
        here = in;
    }
    return placement;
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
    const double rings = placement.per_domain;
    std::vector<Flow> flows{{placement.per_domain, 1.0 / rings}};
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
    for (int d = 1; d < placement.domains; ++d)
        flows.push_back({std::min(d * placement.per_domain, placement.size - 1), 1.0 / (placement.domains - 1)});
    return links.send(0, flows);
}

} // namespace moe::cost
