// The costs of ops on this machine: training runs over a grid of sizes, every op timed where it really runs.
#pragma once

#include "planner/machine/hardware.hpp"
#include "planner/plan/fwd.hpp"
#include "planner/program/fwd.hpp"

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace moe::bench {

struct MicrobenchOptions {
    double seconds = 18.0; // budget in seconds; the grid is walked from small to large and cut off when it is spent
    int permits = 0;       // number of ranks that run at once, 0 = the machine's cores
    std::string backend = "cpu";
    // One rank and sizes up to those of real layers, instead of eight ranks that share a machine's cores.
    bool one_rank = false;
    // Every run in a process of its own (engine/base/run_in_subprocess.hpp): on a GPU, the second training of a process
    // takes longer for each of its ops than the first (docs/notes/engine-calibration.md).
    bool in_subprocess = false;
    std::size_t most = 0;                                  // number of the grid's runs, from the smallest; 0 = all
    std::function<void(const std::string& line)> progress; // called with each line of progress; may be empty
};

struct Microbench {
    // Calls by measured_key(): busy seconds of one rank, sorted by work; with sides where one rank had the device to
    // itself. Ranks run side by side on all cores, so shared caches and memory are in the times, and a communication
    // op's time includes the wake-up of its thread, but not the wait for others.
    std::map<std::string, std::vector<machine::MeasuredCall>> measured;
    // Tiles of the grouped products among these families, where the back end's kernels compute them on such tiles.
    std::map<std::string, std::vector<machine::ProductTile>> product_tiles;
    // Rates of one core, or of a GPU: best large GEMM with operands in that storage, FLOP/s, and bytes/s of the largest
    // elementwise ops (cores: with all of them busy).
    double fp32_flops = 0.0, bf16_flops = 0.0, fp8_flops = 0.0;
    double memory_bandwidth = 0.0;
    std::string device; // device where the ranks' memory lay
    // 0 on devices without a queue. Context: bytes that are taken on the device beside the arena. Launch: the host's
    // time to launch a kernel. Event: the time that a stamp between two ops takes, which is not in the times above.
    double context_bytes = 0.0, launch_seconds = 0.0, event_overhead = 0.0;
};

// Throws Error when this machine cannot run the back end.
Microbench run_microbench(const MicrobenchOptions& options);

// Trains a plan on random text, long enough for the clocks that its devices hold, and records its last steps: by rank,
// rows in the order of OpWalk, `busy` the median over the steps. Throws Error where the plan does not run here.
std::vector<std::vector<program::TimelineRow>> record_training(const plan::Plan& plan, const std::string& backend);

} // namespace moe::bench
