// The share of the device that dispatch and combine over peer memory take, and the gathers that travel with them.
#pragma once

#include "planner/program/fwd.hpp"

#include <cstdint>

namespace moe::program {

// Multiprocessors of a call. All its blocks must run at once: those of combine wait for what blocks of other ranks
// send. So must those of a collective beside it, which wait for the other ranks' as well, and where one rank runs the
// one and another the other first, none comes to its end. So there is room for both: for a collective on the tensor and
// one on the data stream, and for messages of a pipeline where there are some. In merged slots another micro-batch
// computes beside them, and they take what its first products leave (Merge::reserved_sms).
inline constexpr int peer_blocks_alone = 64, peer_blocks_in_pipeline = 32, peer_blocks_beside = 24;
inline constexpr int most_collective_blocks = 32;

// Gathers on the stream of experts whose result has at most so many bytes, counts of routed rows, go over peers' memory
// as well.
inline constexpr std::int64_t most_gathered_over_peers = 256 * 1024;

// The multiprocessors of a Program's calls outside of merged slots.
int peer_blocks(const Program& program);

} // namespace moe::program
