// Ranks on devices that have nothing to do but what is measured: a thread each, and the time of one call of many.
#pragma once

#include "engine/comm/queued.hpp"
#include "engine/ops/backend.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace moe::bench {

struct BenchEnd {
    std::unique_ptr<device::Device> device;
    std::unique_ptr<comm::QueuedCommunicator> communicator;
    char* memory = nullptr; // memory of the device where operands lie
};

// A device each, with so much memory. Throws Error (failure) where a device has not as much free.
std::vector<BenchEnd> open_ends(const ops::Backend& backend, int ranks, std::int64_t bytes);
void release(std::vector<BenchEnd>& ends);

// Runs job(end, rank) of every end at the same time; throws the first fault of any when all have ended.
void at_every(std::vector<BenchEnd>& ends, const std::function<void(BenchEnd&, int)>& job);

// All ends join the groups of a Program that every stage of the mesh runs. They must leave them, by resetting their
// communicators, before the fabric ends.
std::unique_ptr<comm::QueuedFabric> join_ends(const ops::Backend& backend, const plan::Mesh& mesh,
                                              const program::Program& program, std::vector<BenchEnd>& ends);
void leave(std::vector<BenchEnd>& ends);

// Seconds of one of `calls` calls behind each other, each behind a signal of the stream that computes, marked as the
// executor marks it and waited for: the quickest of several runs of a graph of them. All ends at the same time.
// call(number): should work at another place each time, as in a step, or its operands stay in the device's cache.
double seconds_of_call(BenchEnd& end, program::Stream stream, std::size_t calls,
                       const std::function<void(std::size_t)>& call);

} // namespace moe::bench
