// The costs of ranks on this machine's devices beyond those of one alone: every kind of communication over its sizes,
// as the engine queues it, tokens over peers' memory, and the loss that they share.
#pragma once

#include "engine/ops/backend.hpp"
#include "planner/machine/hardware.hpp"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace moe::bench {

struct CollectiveBench {
    // Calls by group_key(), split losses by measured_key(): seconds of a call with everybody there, its hand-over from
    // the stream that computes and back included; bytes as Op::bytes counts them, of exchanged rows also as
    // cost_point() does.
    std::map<std::string, std::vector<machine::MeasuredCall>> measured;
    machine::CommunicatorBytes taken;
    std::string device;
};

// One rank on each of the first `ranks` devices of a back end with queues and collectives, a thread each. Messages of a
// pipeline are measured where there are two. Calls move up to `most_bytes`. Throws Error (failure) where a device has
// not eight times as much free.
CollectiveBench run_collective_bench(const ops::Backend& backend, int ranks,
                                     std::int64_t most_bytes = std::int64_t{512} << 20);

} // namespace moe::bench
