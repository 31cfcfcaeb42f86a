// Communication groups by the axes along which their members differ.
#pragma once

#include <cstdint>
#include <string>

namespace moe::plan {

// A parameter or a communication group belongs to one of the two factorings.
enum class Domain : std::uint8_t { dense, expert };

// Axes of either domain as a bit mask: in the expert domain tensor = ETP, context does not exist, data = EDP.
namespace axis {
inline constexpr std::uint16_t tensor = 1, context = 2, expert = 4, data = 8, pipeline = 16;
// The parts of the context axis: members that trade heads (all-to-all; within a domain under hierarchical CP), and
// those of one place in every such group, which form a ring. Groups along `context` hold both.
inline constexpr std::uint16_t context_inner = 32, context_outer = 64;
inline constexpr std::uint16_t any_context = context | context_inner | context_outer;
// The parts of the data axis under HSDP: members that hold the shards of one copy of the weights, and those that hold
// the same shard. Groups along `data` hold both.
inline constexpr std::uint16_t shards = 128, replicas = 256;
inline constexpr std::uint16_t any_data = data | shards | replicas;
// The parts of the dense tensor axis where TP is above the number of key heads: members that hold the same key head,
// next to each other, and those of one place in every such group, which hold all heads between them. Groups along
// `tensor` hold both.
inline constexpr std::uint16_t key_replicas = 512, key_parts = 1024;
inline constexpr std::uint16_t any_tensor = tensor | key_replicas | key_parts;
// The parts of the expert axis where tokens are dispatched in two levels: members of one NVLink domain, next to each
// other, and those of one place in every domain. Groups along `expert` hold both.
inline constexpr std::uint16_t expert_inner = 2048, expert_outer = 4096;
} // namespace axis

// A communication group, the same words for every rank: the ranks that differ from mine only along `axes`.
struct Group {
    Domain domain = Domain::dense;
    std::uint16_t axes = 0; // 0 = no communication
    bool operator==(const Group&) const = default;
};
std::string to_string(Group group); // "tp", "dp+cp", "ep", "etp+ep", "edp", "pp", ...

// First position of run 0 or 1 of a CP member's part of a sequence, which has `positions` tokens: members hold runs
// `member` and 2 members - 1 - member of 2 members, so that causal attention is the same work for all (zigzag).
constexpr std::int64_t run_start(int member, int run, int members, std::int64_t positions) {
    return (run == 0 ? member : 2 * members - 1 - member) * (positions / 2);
}

} // namespace moe::plan
