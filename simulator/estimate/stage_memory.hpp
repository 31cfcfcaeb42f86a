// Peak memory of a pipeline in closed form, from what each of its stages holds.
#pragma once

#include "planner/lower/lower.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/schedule.hpp"
#include "simulator/estimate/state_memory.hpp"

#include <cstdint>
#include <map>
#include <vector>

namespace moe::estimate {

// The bytes that every stage of one shape holds, but for saved activations.
struct StageMemory {
    double states = 0.0;        // weights, gradients and optimizer
    double visiting = 0.0;      // offloaded optimizer states: on the device only in place of activations
    double copies = 0.0;        // FP32, while the optimizer steps: Plan::optimizer_copy_bytes()
    double muon = 0.0;          // what Newton-Schulz works in, of the bucket that needs most
    double tables = 0.0;        // gradients of other copies of its embedding table, in the same place before them
    double counted_twice = 0.0; // bytes that two of its segments both count as saved
    Workspace workspace;
    std::uint64_t groups = 0; // groups of its communication, see group_bit()
    std::int64_t slots = 0;   // bytes that its exchanges pack rows into, see slots_of(), and windows_of()

    void add_states(const plan::Plan& plan, const passes::BucketSize& bucket);
    void add_tables(const plan::Plan& plan, const plan::Stage& stage);
};

// Segments of a stage that one micro-batch saves, each by its bytes, layers in order.
struct SavedSegments {
    std::vector<std::int64_t> layers, mtp, ends; // ends: of the model
    void add(lower::SegmentKind kind, int count, std::int64_t bytes);
};

// Segments of each size that one rank with these chunks saves at its fullest moment: segments of one size share a pool.
// kept: of kept_together(). Sizes only tell pools apart here.
std::map<std::int64_t, int> most_kept(const std::vector<const SavedSegments*>& chunks,
                                      const std::vector<plan::Kept>& kept);

// Micro-batches of a step that keeps as much at one time as the plan's: schedules keep no more in longer steps.
int enough_micro_batches(const plan::Plan& plan);

// The activations that one pipeline rank keeps of its micro-batches.
struct KeptActivations {
    double bytes = 0.0;
    bool merges = false; // some forward runs beside a backward, each in a workspace of its own
};
// True where a rank with these states, of kept_together(), has merged slots: a step of few micro-batches may have none.
bool merges(const std::vector<plan::Kept>& kept);

// What the trainer writes for each micro-batch: ids, labels, and the documents of its rows where these are masked.
double micro_batch_input_bytes(const plan::Plan& plan);

// Bytes of the fullest rank, constants included. mesh: of the plan; stages: by distinct shape; of_stage: the shape of
// each virtual stage; activations: by pipeline rank.
double peak_bytes(const plan::Plan& plan, const plan::Mesh& mesh, const std::vector<StageMemory>& stages,
                  const std::vector<int>& of_stage, const std::vector<KeptActivations>& activations);

} // namespace moe::estimate
