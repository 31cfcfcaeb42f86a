// Predicted against measured: two timelines of one plan, lined up op by op and summed by op kind.
#pragma once

#include "planner/program/timeline.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace moe::tools {

// Busy seconds of one op kind in one step, averaged over all ranks of the job.
struct KindTotal {
    program::OpKind kind{};
    std::int64_t count = 0; // ops in the step, over all ranks
    double seconds = 0.0;
};
// Kinds with rows in the timeline, most seconds first; a representative's rows count for every rank it stands for.
std::vector<KindTotal> totals_by_kind(const program::Timeline& timeline);

struct ComparedKind {
    program::OpKind kind{};
    std::int64_t count = 0;
    double predicted = 0.0, measured = 0.0; // busy seconds per step and rank
};
struct ComparedOp { // one op that both timelines hold
    program::TimelineRow predicted, measured;
};
struct Comparison {
    double predicted_tflops = 0.0, measured_tflops = 0.0;   // model TFLOPS/GPU
    double predicted_seconds = 0.0, measured_seconds = 0.0; // of the step
    double predicted_memory_gib = 0.0, measured_memory_gib = 0.0;
    double predicted_exposed = 0.0, measured_exposed = 0.0; // seconds of exposed_communication()
    std::vector<ComparedKind> kinds;                        // most measured seconds first
    std::int64_t matched = 0;                               // ops with the same id on the same rank in both
    std::vector<ComparedOp> widest; // of them, those that are furthest apart in busy seconds, furthest first
    // predicted / measured - 1 of the model TFLOPS/GPU
    double error() const { return measured_tflops > 0.0 ? predicted_tflops / measured_tflops - 1.0 : 0.0; }
};

// Throws Error (bad_input) when the timelines are not the predicted and the measured one of the same plan.
Comparison compare(const program::Timeline& predicted, const program::Timeline& measured);

} // namespace moe::tools
