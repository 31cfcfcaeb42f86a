// Sockets: how the processes of a run find each other, and whole reads and writes.
#pragma once

#include "engine/comm/launch.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace moe::comm {

std::string system_reason(int error);

// All of it; false when the connection has ended.
bool write_bytes(int socket, const void* data, std::size_t bytes);
// Writes what the connection takes at once, in bytes.
inline constexpr std::size_t connection_ended = ~std::size_t{0};
std::size_t write_some(int socket, const void* data, std::size_t bytes);
bool wait_writable(int socket, double seconds); // returns false when the socket takes nothing until then

struct Meeting {
    std::vector<int> sockets; // sockets by rank, -1 for this process
    std::string run;          // id of the run, drawn by rank 0
};

// Rank 0 listens at the launch's place; the others call there, say where they listen themselves, and learn where the
// ranks before them do, which they call in turn. Waits for `patience` seconds. Throws Error: (bad_input) where
// processes differ in `world` or `fingerprint`, (failure) where some do not come.
Meeting meet_processes(const Launch& launch, std::uint64_t fingerprint, double patience);

} // namespace moe::comm
