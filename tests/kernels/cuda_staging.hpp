// The CUDA kernels behind the CPU's signatures: every call copies its operands to the device and back.
//
// A call is captured in a CUDA graph, which must consist of kernels and memsets alone, and the graph is run. Each
// device copy lies between guards: whatever writes outside an operand is an error, whatever reads outside reads NaN.
#pragma once

#include "kernels/kernels.hpp"

namespace moe::test {

// Needs a device (cuda_supported). Operands must lie in tracked buffers; throws std::runtime_error where the device,
// the graph or a guard says that something is wrong.
const Kernels& staged_kernels();

// True where staged calls take the table without libraries (cuda_plain_kernels); off at first.
bool& staged_plain();

// The number of times that staged calls run their graph: once, or several times with the time summed up here.
struct Stopwatch {
    int runs = 0; // 0: not timing
    double seconds = 0.0;
};
Stopwatch& stopwatch();

// Seconds on the device of what `call` launches through the staged table, each launch at the median of 20 runs.
template <class Call>
double device_seconds(Call call) {
    stopwatch() = {20, 0.0};
    call();
    const double seconds = stopwatch().seconds;
    stopwatch() = {};
    return seconds;
}

} // namespace moe::test
