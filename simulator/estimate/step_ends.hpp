// What a pipeline rank does before its first slot and behind its last: gathers, zeroed gradients, norm and optimizer.
#pragma once

#include "simulator/estimate/step_model.hpp"
#include "simulator/replay/contention.hpp"

#include <cstddef>
#include <vector>

namespace moe::estimate {

// Where one pipeline rank has come to in its step.
struct RankState {
    const std::vector<plan::Turn>* turns = nullptr;
    std::size_t next = 0; // turn
    replay::StreamClocks clocks;
    double in_free = 0.0, out_free = 0.0, data_free = 0.0; // when its messages and its data parallelism are through
    double quantized = 0.0;                                // seconds at which the last weights are quantized
    std::vector<const BucketTime*> buckets;                // buckets of its chunks in order
    std::vector<std::size_t> first_bucket;                 // first bucket by chunk
    std::vector<double> gathered, zeroed;                  // seconds at which each bucket is there
    replay::CommIntervals collectives;                     // communication beside what computes
    std::vector<int> backwards_left, forwards_left;        // by chunk
    RankPlay play;
};

// Weights are gathered one bucket after another while the first forward already runs; gradients are zeroed, and what
// one rank alone has is quantized, before it.
void begin_step(const plan::Plan& plan, const StepModel& model, RankState& rank);

// Puts off a rank's clock where collectives are beside the `seconds` until now, of which it has computed for that part;
// by how much.
double slow_down(const StepModel& model, RankState& rank, double seconds, double computes);

// Norm over all ranks, then the optimizer.
std::vector<RankPlay> finish_step(const plan::Plan& plan, const StepModel& model, std::vector<RankState>& ranks);

} // namespace moe::estimate
