// Multiprocessors that dispatch and combine over peer memory take: nearly all where nothing runs beside them.
#pragma once

#include "planner/program.hpp"

namespace moe {

inline constexpr int peer_blocks_alone = 128, peer_blocks_beside = 24;

// EP overlap computes beside them, what else a rank does waits for their results.
inline int peer_blocks(const Program& program) {
    return program.merges.empty() ? peer_blocks_alone : peer_blocks_beside;
}

} // namespace moe
