// How layers are cut into pipeline stages, and in which order a pipeline rank runs their forward and backward slots.
#pragma once

#include "planner/plan.hpp"

#include <vector>

namespace moe {

// What one virtual stage holds. Stage k of pp*vpp runs on pipeline rank k % pp as chunk k / pp.
struct Stage {
    bool embedding = false;
    int first_layer = 0, layers = 0; // decoder layers [first_layer, first_layer + layers)
    int mtp = 0;                     // MTP layers, all on one stage
    bool loss = false;               // final norm, LM head, cross-entropy
};

// The stages of a plan: its layout string (Megatron's: E t m L | ( )*n, commas allowed, empty stages allowed), or, when
// it has none, decoder layers cut as evenly as possible with the longer stages away from the embedding and the loss.
// Throws Error (bad_input) when the string does not hold exactly the model's layers in pp*vpp stages.
std::vector<Stage> stages(const Plan& plan);

// One entry of a pipeline rank's order of work.
struct Turn {
    bool forward = true;
    int chunk = 0;
    int micro_batch = 0;
};

// 1F1B and Megatron's interleaved order for pipeline rank `rank`; forward and backward of each (chunk, micro-batch)
// once.
std::vector<Turn> order(ScheduleKind kind, int pp, int vpp, int micro_batches, int rank, bool ep_overlap = false);

// For each chunk of that rank: the most micro-batches that are between the start of their forward and the end of their
// backward at one time. FIFO per chunk, so instance = micro_batch % in_flight never collides.
std::vector<int> in_flight(const std::vector<Turn>& turns, int vpp);

} // namespace moe
