// Seconds of one collective over a group that lies somewhere on the machine: alpha-beta costs over the network's
// routes.
#pragma once

#include "planner/machine/hardware.hpp"
#include "planner/model/layer_kind.hpp"
#include "planner/plan/fwd.hpp"
#include "planner/plan/group.hpp"
#include "planner/stack/fwd.hpp"
#include "simulator/cost/network.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

namespace moe::cost {

// Routes of one machine by placement, worked out once each. Thread-safe.
class Routes {
public:
    explicit Routes(const machine::Hardware& hardware) : hardware_(hardware) {}
    struct Set {
        Route exchange, ring, pair, domains;
    };
    const Set& of(const Placement& placement) const;
    // The placement of a group of the plan: the worst of its instances. Pipeline alone: the neighbours that are
    // farthest apart.
    Placement placement(const plan::Plan& plan, plan::Group group) const;
    const machine::Hardware& hardware() const { return hardware_; }

private:
    const machine::Hardware& hardware_;
    mutable std::mutex mutex_;
    mutable std::map<Placement, Set> sets_;
    struct GroupKey {
        std::array<int, 13> numbers; // of the mesh, and domain and axes of the group
        std::string rank_order;
        bool operator==(const GroupKey&) const = default;
    };
    struct KeyHash {
        std::size_t operator()(const GroupKey& key) const {
            std::size_t sum = 0;
            for (const int number : key.numbers) sum = (sum ^ static_cast<std::size_t>(number)) * 0x9E3779B97F4A7C15U;
            return sum ^ sum >> 32;
        }
    };
    mutable std::unordered_map<GroupKey, Placement, KeyHash> placements_;
};

// A group as a collective sees it; `efficiency` is the fraction of link bandwidth that the library reaches.
struct GroupLinks {
    Placement placement;
    Routes::Set routes;
    machine::Link nvlink, pcie, nic;
    double efficiency = 1.0;
};

// Ring: (n-1) steps of latency, (n-1)/n of the bytes through the fullest link; or a tree: log2(n) steps at half the
// rate, whichever is sooner, as NCCL chooses by size. `bytes`: output of the gather, input of the scatter, the reduced
// tensor.
double all_gather_seconds(const GroupLinks& group, double bytes);
double reduce_scatter_seconds(const GroupLinks& group, double bytes);
double all_reduce_seconds(const GroupLinks& group, double bytes);
// `bytes`: all that one member holds, its own share included. One message to every other member.
double all_to_all_seconds(const GroupLinks& group, double bytes);
// One hop of a ring of context-parallel ranks, and a message between pipeline neighbours.
double ring_step_seconds(const GroupLinks& group, double bytes);
double pair_seconds(const GroupLinks& group, double bytes);

// Dispatch or combine that sends one copy of a token per distinct destination: over the NIC once per node, to the peer
// of the same index there, over PCIe once per NVLink domain and over NVLink once per rank; all at the same time.
// copy_bytes: all local tokens once. groups: equal groups that share the experts, each of which has come by its tokens
// already; every member then passes on those of its place in all of them.
double token_exchange_seconds(const GroupLinks& group, const stack::LinkShares& shares, double copy_bytes,
                              const model::Moe& moe, int groups = 1);

} // namespace moe::cost
