// Event-driven simulation of one step of a plan: the very Programs that execute runs, op by op.
#pragma once

#include "planner/memory/memory.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/timeline.hpp"
#include "planner/search/pricing.hpp"
#include "planner/stack/fwd.hpp"
#include "simulator/routing/routing.hpp"

#include <cstdint>
#include <mutex>
#include <vector>

namespace moe::replay {

struct Simulation {
    plan::Plan timed, planned;  // plans whose Programs gave times and memory: the plan with its routing as loads
    program::Timeline timeline; // rows of the representatives; empty rows when they were not asked for
    search::Estimate estimate;
    std::int64_t ops = 0; // ops that were played
    int ranks = 0;        // ranks that the representatives stand for: all of the job
    // Index in timeline.ranks of the rank whose breakdown is given: the one that waits least for others. All meet at
    // the norm of the gradients, so that which ends last says little.
    int slowest = 0;
    // Seconds of attention's cores over documents, of one micro-batch on the pipeline rank that has most; 0 where the
    // plan masks none.
    double core_seconds = 0.0;
    double host_seconds = 0.0;                 // when the last host had issued its last op
    std::vector<memory::MemoryPlan> memory;    // memory plans by pipeline rank
    std::vector<memory::MemoryBreakdown> held; // parts of the arena, by pipeline rank
    std::vector<double> memory_bytes;          // bytes by pipeline rank: arena and constants
};

// Plays one representative per pipeline rank (GPUs: all ranks of a stage are equal) or every rank (CPU). The plan must
// be sound and within the stack; throws Error (bad_input) for what cannot be priced. Skewed routing is played at the
// loads of `point`.
Simulation simulate(const plan::Plan& plan, const stack::Stack& stack, bool keep_rows = true,
                    routing::SkewPoint point = routing::SkewPoint::mean);

// Room for the rows of plays, megabytes for each: what one play leaves is the next one's. Thread-safe.
class RowRoom {
public:
    std::vector<program::TimelineRow> take();
    void give(std::vector<program::TimelineRow> rows);

private:
    std::mutex mutex_;
    std::vector<std::vector<program::TimelineRow>> spare_;
};

// simulate() without memory, whose members stay empty, and without rows, which `room` gets back; the estimate has no
// memory_bytes, and fits if the host's memory does. For those who know the bytes otherwise.
Simulation timed(const plan::Plan& plan, const stack::Stack& stack, RowRoom& room);

// Arena plus what a rank holds outside of it: context and one buffer per communication group that it is a member of.
double rank_memory_bytes(const plan::Plan& plan, const program::Program& program, std::int64_t arena_bytes);

// The figures that follow from step time and memory; `breakdown` and the rest are left alone.
void fill_rates(const plan::Plan& plan, search::Estimate& estimate);

} // namespace moe::replay
