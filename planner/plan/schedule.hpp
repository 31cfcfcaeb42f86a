// Schedules: the cut of layers into pipeline stages, and the order in which a pipeline rank runs their forward and
// backward slots.
#pragma once

#include "planner/model/fwd.hpp"
#include "planner/plan/choices.hpp"
#include "planner/plan/fwd.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace moe::plan {

// The layers that one virtual stage holds; rank_of_stage() says where it runs.
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
// The number of stages that the plan's layout string has, whatever pp*vpp is. Throws Error (bad_input) when it cannot
// be read.
int layout_stage_count(const Plan& plan);
// The shortest layout string that gives these stages, e.g. "Ettt|(tt|)*29m|L".
std::string layout_to_string(const std::vector<Stage>& stages);

// True where a stage may begin with this layer: one that shares an earlier layer's choice of keys stays on its stage.
bool may_begin_stage(const model::Model& model, int layer);
// The number of stages that the model can be cut into: runs of layers that stay together, the MTP layers, the head.
int cut_units(const model::Model& model);

// Model FLOPs of each stage in thousandths of the mean decoder layer's, MTP layers and LM head included.
std::vector<std::int64_t> stage_weights(const model::Model& model, std::int64_t seq, const std::vector<Stage>& stages);
// The contiguous cut of layers, MTP and head into `count` stages whose heaviest stage by those weights is lightest, and
// among these the one with the smallest sum of squares. Throws Error (bad_input) for fewer cut_units() than stages.
std::vector<Stage> balanced_stages(const model::Model& model, std::int64_t seq, int count);

// Stage k of pp*vpp runs on pipeline rank k % pp as chunk k / pp; in a V, chunk 1 comes back from the last rank to the
// first.
int rank_of_stage(ScheduleKind kind, int pp, int stage);
int stage_of(ScheduleKind kind, int pp, int rank, int chunk);

// begin: gathers weights, zeroes gradients. backward: of activations and of weights, or each in a slot of its own
// (dgrad, then wgrad). finish: what is left of the gradient reduction, norm, optimizer.
enum class SlotKind : std::uint8_t { forward, backward, dgrad, wgrad, begin, finish };
const char* to_string(SlotKind kind);

// One entry of a pipeline rank's order of work.
struct Turn {
    SlotKind kind = SlotKind::forward;
    int chunk = 0;
    int micro_batch = 0;
    bool merged = false; // EP overlap: a forward beside which the turn behind it, a whole backward, runs
    bool forward() const { return kind == SlotKind::forward; }
    // True where the activations that a micro-batch saved on a chunk are free behind this turn.
    bool last() const { return kind == SlotKind::backward || kind == SlotKind::wgrad; }
};

// The order of pipeline rank `rank`: 1F1B, Megatron's interleaved one, and those that split backwards
// (split_orders.cpp). Each (chunk, micro-batch) once forward, then once backward or once dgrad and once wgrad.
//
// EP overlap merges the forwards behind the warm-up with the backwards behind them, which are of other micro-batches or
// chunks. A last warm-up forward stays alone where micro-batches are too few to fill the pipeline: the backward behind
// it may need what the forward sends, and a merged pair sends nothing before it has received both inputs.
std::vector<Turn> order(ScheduleKind kind, int pp, int vpp, int micro_batches, int rank, bool ep_overlap = false);

// Forwards of that rank before its first backward, for schedules that do not split backwards: as Megatron-LM counts
// them, and with EP overlap more, none of which is merged with a backward (the last backwards are as many).
int warm_up_forwards(ScheduleKind kind, int pp, int vpp, int micro_batches, int rank, bool ep_overlap);

// The most micro-batches that are between the start of their forward and the end of their backward (or wgrad) at one
// time, for each chunk of that rank. FIFO per chunk, so instance = micro_batch % in_flight never collides.
std::vector<int> in_flight(const std::vector<Turn>& turns, int vpp);

// The micro-batches that the rank keeps together, wholly or in part, by chunk, before a backward or dgrad slot.
struct Kept {
    std::vector<int> micro_batches; // numbers by chunk
    // EP overlap: chunks of the pair that runs next, a forward which is saved layer by layer while the backward beside
    // it releases; -1 = the backward runs alone.
    int forward = -1, backward = -1;
};
// The fullest states: those that no other state of the same pair exceeds in every chunk. The chunks reach their
// in_flight at different times, so that no state is as full as the sum of in_flight.
std::vector<Kept> kept_together(const std::vector<Turn>& turns, int vpp);

} // namespace moe::plan
