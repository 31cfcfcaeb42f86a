// The memory-bound CUDA kernels at sizes of training, beside what a copy moves on the same device in the same run.
#pragma once

#include <string>
#include <vector>

namespace moe::test {

struct Moved {
    std::string name;
    double bytes = 0.0;   // that the op must read and write, each once
    double seconds = 0.0; // of one call, median
};

// Time of a call per byte of cudaMemcpyAsync within the device, counting bytes read and bytes written.
double copy_bytes_per_second();

// Every kernel once at the sizes of a layer of Qwen3-30B-A3B (or what is named) and 16,384 tokens.
std::vector<Moved> bandwidth_of_kernels();

} // namespace moe::test
