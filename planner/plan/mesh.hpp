// The two factorings of the same ranks, dense TP x CP x DP x PP and expert ETP x EP x EDP x PP, and the groups they
// give.
#pragma once

#include "planner/plan/plan.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace moe {

// A parameter or a communication group belongs to one of the two factorings.
enum class Domain : std::uint8_t { dense, expert };

// Axes of either domain as a bit mask: in the expert domain tensor = ETP, context does not exist, data = EDP.
namespace axis {
inline constexpr std::uint8_t tensor = 1, context = 2, expert = 4, data = 8, pipeline = 16;
}

// A communication group, the same words for every rank: the ranks that differ from mine only along `axes`.
struct Group {
    Domain domain = Domain::dense;
    std::uint8_t axes = 0; // 0 = no communication
    bool operator==(const Group&) const = default;
};
std::string to_string(Group group); // "tp", "dp+cp", "ep", "etp+ep", "edp", "pp", ...

// First position of run 0 or 1 of a CP member's part of a sequence, which has `positions` tokens: members hold runs
// `member` and 2 members - 1 - member of 2 members, so that causal attention is the same work for all (zigzag).
constexpr std::int64_t run_start(int member, int run, int members, std::int64_t positions) {
    return (run == 0 ? member : 2 * members - 1 - member) * (positions / 2);
}

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
    // What the first members of the group's instances leave as remainder modulo `modulus`, ascending.
    std::vector<int> first_members(Group group, int modulus) const;
    // Position of `rank` within members(group, rank).
    int index(Group group, int rank) const;
    // Coordinate along one axis, e.g. coordinate(Domain::dense, axis::pipeline, rank).
    int coordinate(Domain domain, std::uint8_t one_axis, int rank) const;

private:
    struct Axis {
        std::uint8_t bit;
        int size;
        int stride;
    };
    std::vector<Axis> axes_[2]; // by Domain, in the order's sequence
    int world_ = 1;
};

} // namespace moe
