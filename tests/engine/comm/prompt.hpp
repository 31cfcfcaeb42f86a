// A back end for tests of queued communication: the CPU's kernels on devices that do at once what is queued on them,
// with a library of collectives between threads in NCCL's place.
#pragma once

#include "engine/ops/backend.hpp"

#include <cstdint>
#include <memory>

// 16 devices; every signal must have been given before it is awaited, or the rank fails.
const moe::ops::Backend& prompt_backend();
// The library that prompt_backend() communicates by: reductions in the order of the members, with the bits of ranks
// that read each other's memory.
const moe::comm::CollectiveLibrary& prompt_library();
// The same with windows, through which kernels on the host move the chunks that are filled and nothing else; where one
// is refused, or does not open, it is rank 1's.
enum class Windows { all, one_refused, one_closed };
const moe::comm::CollectiveLibrary& prompt_library(Windows windows);
// Bytes that such kernels have sent to other members so far.
std::int64_t bytes_in_chunks();
// A device of prompt_backend() whose queue never gets idle.
std::unique_ptr<moe::device::Device> open_stuck(bool, int);
// One whose steps take so long, in seconds: before the first op, every op, and a stamp behind it.
struct Clocked {
    double launch = 60e-6, op = 10e-6, stamp = 4e-6;
};
inline constexpr Clocked clocked;
std::unique_ptr<moe::device::Device> open_clocked(bool, int);

struct Departures { // from all communicators of the process so far
    int left = 0, abandoned = 0;
};
Departures departures();
