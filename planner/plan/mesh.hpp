// The two factorings of the same ranks, dense TP x CP x DP x PP and expert ETP x EP x EDP x PP, and the groups they
// give.
#pragma once

#include "planner/machine/fwd.hpp"
#include "planner/plan/fwd.hpp"
#include "planner/plan/group.hpp"

#include <cstdint>
#include <utility>
#include <vector>

namespace moe::plan {

// Members of a CP group that trade heads for tokens: one in a ring, all under all-to-all; under hierarchical CP those
// next to each other within one NVLink domain, as many as divide CP and fit there beside TP. The others of the group
// are in a ring of CP / context_inner() ranks.
int context_inner(const Plan& plan);

// GPUs of a job that share NVLink: nvlink_domain_used where the job fills whole domains, else the largest number up to
// it that divides the job evenly.
int domain_of_job(const machine::Hardware& hardware, int gpus);

// Ranks that kernels of dispatch over peers' memory take at most (most_peers in kernels/peers.hpp).
inline constexpr int most_peer_ranks = 8;

// Members of an EP group that tokens reach over their domain's links: all, where tokens are dispatched at one level.
// Dispatch over peers' memory (hybridep of our stack) has two levels where the group spans NVLink domains or has more
// than most_peer_ranks: then as many members next to each other as divide EP and lie in one domain, whatever group it
// is. A token goes once to each of the EP / expert_inner() domains that has some of its experts, and on from there.
int expert_inner(const Plan& plan);

// Copies of the weights of a domain under HSDP (Plan::fsdp_replicas), each sharded over a part of the data axis.
// Experts that EDP does not hold several times have one.
int weight_replicas(const Plan& plan, Domain domain);

// Ranks of a TP group that hold the same key head, where TP is above the number of key heads of a layer kind; 1 where
// it is above none. check_plan() sees to it that all such kinds agree.
int key_replicas(const Plan& plan);

// Degree of a group in a plan.
int group_size(const Plan& plan, Group group);

class Mesh {
public:
    // Degrees and rank order of a sound plan. Order strings as Megatron writes them: "tp-cp-ep-dp-pp" (default;
    // leftmost varies fastest; "dp" orders both DP and EDP) and any permutation in which both factorings have equal PP
    // groups. Throws Error (bad_input) naming the order when they differ.
    explicit Mesh(const Plan& plan);

    int size() const { return world_; }
    int group_size(Group group) const;
    // Members of `rank`'s group in increasing index along the group's axes (leftmost axis of the order fastest).
    std::vector<int> members(Group group, int rank) const;
    // The remainders modulo `modulus` of the first members of the group's instances, ascending.
    std::vector<int> first_members(Group group, int modulus) const;
    // True where both are groups of the same ranks.
    bool same_members(Group a, Group b) const;
    // Position of `rank` within members(group, rank).
    int index(Group group, int rank) const;
    // Coordinate along one axis, e.g. coordinate(Domain::dense, axis::pipeline, rank).
    int coordinate(Domain domain, std::uint16_t one_axis, int rank) const;

private:
    struct Axis {
        std::uint16_t bit;
        int size;
        int stride;
    };
    // Members from `rank` 0 on in runs: so many ranks at one distance, and copies of these at the next one. Axes behind
    // each other are one run.
    std::vector<std::pair<int, int>> runs(Group group) const; // (stride, size)

    std::vector<Axis> axes_[2]; // axes by Domain, in the order's sequence
    int world_ = 1;
};

} // namespace moe::plan
