// Copies to the host's pinned memory and back by a kernel, beside the driver's copy engine.
#pragma once

#include <string>
#include <vector>

namespace moe::test {

// Median seconds of a copy by so many blocks, in a graph, and of the same by cudaMemcpyAsync.
struct HostCopy {
    std::string name;
    int blocks = 0;
    double seconds = 0.0, engine_seconds = 0.0;
};

// Copies of a layer's offloaded tensor (64 MiB) either way, by as many blocks as plans give them and by twice as many.
std::vector<HostCopy> host_copies();

} // namespace moe::test
