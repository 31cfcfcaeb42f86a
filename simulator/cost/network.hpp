// The links of a job as a graph (GPU, NVLink switch, PCIe, NIC, fabric) and what one communication group gets of them.
#pragma once

#include "planner/machine/fwd.hpp"
#include "planner/plan/fwd.hpp"
#include "planner/plan/mesh.hpp"

#include <string>
#include <vector>

namespace moe::cost {

// The place of a group on the machine.
struct Placement {
    int size = 1;
    int domains = 1;    // NVLink domains that it touches
    int per_domain = 1; // members in the fullest domain
    // Nodes that it touches, and members in the fullest: members that reach each other without a NIC. A domain that is
    // a node or larger counts as one.
    int nodes = domains, per_node = per_domain;
    // Domains of the fullest node, between which messages take PCIe.
    int domains_per_node() const { return (per_node + per_domain - 1) / per_domain; }
    bool operator==(const Placement&) const = default;
    auto operator<=>(const Placement&) const = default;
};

using plan::domain_of_job;
// GPUs of a job that reach each other without a NIC: the largest number of whole domains up to a node that divides the
// job evenly; the domain itself where it is the node or larger, or the machine has no PCIe tier.
int node_of_job(const machine::Hardware& hardware, int gpus);
// Ranks lie on the machine in order: rank r in domain r / domain of node r / node. Members in increasing order.
Placement place(const std::vector<int>& members, int domain, int node);

// What a plan asks of the network that the hardware's figures do not tell, as one line; "" where they tell all. Experts
// over several nodes by a library that sends from the GPU, where the network has a time for each message (EFA): there a
// proxy on the host sends, at a rate that nobody has published by size.
std::string unpriced(const plan::Plan& plan);

// The speed of a pattern of messages: seconds = latency + bytes / bandwidth, where `bytes` is all that one member
// sends. All groups of one shape work at once, so a link carries what every member puts on it; switches themselves do
// not block.
struct Route {
    double bandwidth = 0.0; // bytes/s of one member, limited by its fullest link
    double latency = 0.0;   // seconds of the slowest single message
};

// Every member sends equal shares to all others.
Route exchange_route(const machine::Hardware& hardware, const Placement& placement);
// Every member passes all bytes on around a ring. A group over several nodes runs one ring per member of a node, each
// crossing over another NIC, so the NICs of a node add up (NCCL's channels do the same); likewise the PCIe links of a
// domain between the domains of a node.
Route ring_route(const machine::Hardware& hardware, const Placement& placement);
// One message from the first to the last member.
Route pair_route(const machine::Hardware& hardware, const Placement& placement);
// Messages to every other node only, equal shares: the half of token-based dispatch that NICs carry.
Route domain_route(const machine::Hardware& hardware, const Placement& placement);

} // namespace moe::cost
