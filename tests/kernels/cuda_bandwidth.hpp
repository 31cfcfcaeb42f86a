// The memory-bound CUDA kernels at sizes of training, beside what a copy moves on the same device in the same run.
#pragma once

#include <string>
#include <vector>

namespace moe::test {

// Seconds of one call, and of a copy (cudaMemcpyAsync within the device, read and written) of the bytes that the op
// must read and write, each once; medians.
struct Moved {
    std::string name;
    double seconds = 0.0, copy_seconds = 0.0;
};

// Every kernel with `part` in its name once at the sizes of a layer of Qwen3-30B-A3B (or what is named) and 16,384
// tokens.
std::vector<Moved> bandwidth_of_kernels(const std::string& part = "");

} // namespace moe::test
