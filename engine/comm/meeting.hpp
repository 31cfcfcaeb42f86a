// How the processes of a run find each other.
#pragma once

#include "engine/comm/launch.hpp"
#include "engine/comm/sockets.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace moe::comm {

struct Meeting {
    std::vector<int> sockets; // sockets by rank, -1 for this process
    std::string run;          // id of the run, drawn by rank 0
    Socket listener;          // rank 0's: whoever still calls there is late
};

// Rank 0 listens at the launch's place; the others call there, say where they listen themselves, and learn where the
// ranks before them do, which they call in turn. Both sides prove that they know the launch's token; without one only
// addresses of this machine are used. A caller that is none of ours is sent away, and a rank that dies before all have
// come may come again. Waits for `patience` seconds. Throws Error: (bad_input) where processes differ in `world` or
// `fingerprint`, or have no token and other machines' addresses; (failure) where some do not come.
Meeting meet_processes(const Launch& launch, std::uint64_t fingerprint, double patience);
// Tells one late caller so.
void turn_away(int listener);

} // namespace moe::comm
