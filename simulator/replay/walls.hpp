// The three walls that a plan runs against: memory, communication, and compute with its host; each with figures.
#pragma once

#include "planner/plan/fwd.hpp"
#include "planner/stack/fwd.hpp"
#include "simulator/replay/simulate.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace moe::replay {

// The communication of the rank that ends last, in one step over one kind of group.
struct CommunicationWall {
    std::string axis;     // "tensor", "context", "expert", "pipeline", "data"
    double busy = 0.0;    // seconds of transfers, waiting for peers left out
    double exposed = 0.0; // seconds of them in which nothing computes (Breakdown)
    double bytes = 0.0;   // sum of Op::bytes
    std::int64_t ops = 0;
};

// Ops of one class on that rank, communication apart.
struct ComputeWall {
    std::string name;  // "products", "grouped products", "attention", "scans", "rows" (moved by index), "copies to the
                       // host and back", "other"
    double busy = 0.0; // seconds
    // Seconds at the machine's peak: FLOPs at peak_flops, or bytes at memory_bandwidth (at the host link's) if longer.
    double ideal = 0.0;
    double repeated = 0; // seconds of recomputation in `busy`
    std::int64_t ops = 0;
};

struct Walls {
    int stage = 0; // pipeline rank whose communication and compute these are: Simulation::slowest
    std::vector<CommunicationWall> communication; // axes that the plan uses, most busy first
    std::vector<ComputeWall> compute;             // classes that occur, most busy first
    std::int64_t reserving =
        0;                // products that leave multiprocessors to tokens on their way over peer memory beside them
    int reserved_sms = 0; // and how many at most
    // Products whose rows do not begin at whole 16 bytes, the seconds that they lose by it, and the narrowest such
    // width.
    std::int64_t unaligned = 0, unaligned_width = 0;
    double unaligned_seconds = 0.0;
    double model_seconds = 0.0; // the step at the precision's peak: model FLOPs alone; over the step time it is the MFU
    double issue_seconds = 0.0; // the host's time to issue the rank's ops
    std::int64_t launches = 0;  // ops that it issues
    int fullest = 0;            // pipeline rank that holds most
    double memory_bytes = 0.0, memory_limit = 0.0; // bytes of that rank and those that it may hold
    std::vector<std::pair<std::string, double>>
        memory; // bytes by class, saved activations by module; largest first, adds up to memory_bytes
};

// `simulation` must be of the plan and hold its rows.
Walls walls(const plan::Plan& plan, const stack::Stack& stack, const Simulation& simulation);

} // namespace moe::replay
