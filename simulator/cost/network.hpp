// The links of a job as a graph (GPU, NVLink switch, NIC, fabric) and what one communication group gets of them.
#pragma once

#include "planner/machine/fwd.hpp"

#include <vector>

namespace moe::cost {

// The place of a group on the machine.
struct Placement {
    int size = 1;
    int domains = 1;    // NVLink domains that it touches
    int per_domain = 1; // members in the fullest domain
    bool operator==(const Placement&) const = default;
    auto operator<=>(const Placement&) const = default;
};

// GPUs of a job that share NVLink: nvlink_domain_used where the job fills whole domains, else the largest number up to
// it that divides the job evenly.
int domain_of_job(const machine::Hardware& hardware, int gpus);
// Ranks lie on the machine in order: rank r in domain r / domain. Members in increasing order.
Placement place(const std::vector<int>& members, int domain);

// The speed of a pattern of messages: seconds = latency + bytes / bandwidth, where `bytes` is all that one member
// sends. All groups of one shape work at once, so a link carries what every member puts on it; switches themselves do
// not block.
struct Route {
    double bandwidth = 0.0; // bytes/s of one member, limited by its fullest link
    double latency = 0.0;   // seconds of the slowest single message
};

// Every member sends equal shares to all others.
Route exchange_route(const machine::Hardware& hardware, const Placement& placement);
// Every member passes all bytes on around a ring. A group over several domains runs one ring per member of a domain,
// each crossing over another NIC, so the NICs of a domain add up (NCCL's channels do the same).
Route ring_route(const machine::Hardware& hardware, const Placement& placement);
// One message from the first to the last member.
Route pair_route(const machine::Hardware& hardware, const Placement& placement);
// Messages to every other domain only, equal shares: the inter-domain half of token-based dispatch.
Route domain_route(const machine::Hardware& hardware, const Placement& placement);

} // namespace moe::cost
