// What ops cost on this machine: small training runs over a grid of sizes, every op timed where it really runs.
#pragma once

#include "planner/hardware.hpp"

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace moe {

struct MicrobenchOptions {
    double seconds = 18.0; // budget; the grid is walked from small to large and cut off when it is spent
    int permits = 0;       // ranks that run at once, 0 = the machine's cores
    std::function<void(const std::string& line)> progress; // may be empty
};

struct Microbench {
    // By measured_key(kind, dtype of the first operand): busy seconds of one rank against the op's FLOPs, or its bytes
    // where it has none, sorted by work. Ranks run side by side on all cores, so shared caches and memory are in the
    // times, and a communication op's time includes the wake-up of its thread, but not the wait for others.
    std::map<std::string, std::vector<MeasuredCall>> measured;
    double fp32_flops = 0.0, bf16_flops = 0.0; // of one core, best large GEMM with operands in that storage, FLOP/s
    double memory_bandwidth = 0.0;             // of one core with all busy, bytes/s, largest elementwise ops
};

// Throws Error (failure) when this machine cannot run the CPU back end.
Microbench run_microbench(const MicrobenchOptions& options);

} // namespace moe
