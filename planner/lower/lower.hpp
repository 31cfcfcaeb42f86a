// Lowering: a plan becomes the Program of each kind of rank, or the ops of one layer alone.
#pragma once

#include "planner/lower/passes/step_ops.hpp"
#include "planner/plan/fwd.hpp"
#include "planner/plan/group.hpp"
#include "planner/program/fwd.hpp"
#include "planner/program/program.hpp"
#include "planner/program/tensor.hpp"
#include <cstdint>
#include <vector>

namespace moe::lower {

// The Program of every rank of pipeline stage `pipeline_rank` of a sound plan (check_plan). Throws Error (bad_input)
// for a combination that has no lowering, naming the field.
program::Program lower(const plan::Plan& plan, int pipeline_rank);

// Forward passes alone, by the same emitters, over the states of lower()'s Program: weights are gathered as a step
// begins, every micro-batch goes forward once, and losses are summed over the ranks. Nothing is kept for a backward,
// and no weight changes.
struct ForwardOnly {
    // No step is taken in the same arena: gradients and moments have no room in it, where weights are not quantized.
    bool alone = false;
    // Above 0, attention sees the keys and values of earlier calls, which it keeps for positions below that, MTP is
    // left out, and the head leaves logits in place of a loss: one rank, one sequence.
    std::int64_t cached_keys = 0;
};
program::Program lower_forward(const plan::Plan& plan, int pipeline_rank, const ForwardOnly& what = {});

// The kinds of segments that lie between two stage boundaries, for the fast estimate: one decoder layer of a kind, or
// the ends of the model. Where a layout puts MTP on a stage before the loss, it is an mtp_body, without its pass of the
// LM head, which all_heads makes behind that of the model itself.
enum class SegmentKind : std::uint8_t { embedding, layer, mtp, mtp_body, head, all_heads };
inline bool is_mtp(SegmentKind kind) { return kind == SegmentKind::mtp || kind == SegmentKind::mtp_body; }
inline bool is_head(SegmentKind kind) { return kind == SegmentKind::head || kind == SegmentKind::all_heads; }
// A Program with one chunk that holds only the segment: template 0 is its forward, template 1 its backward, no slots.
program::Program lower_segment(const plan::Plan& plan, SegmentKind segment, int layer_kind = 0);

// The flat buckets of a stage, for the fast estimate: without lowering any layer.
std::vector<passes::BucketSize> bucket_sizes(const plan::Plan& plan, const plan::Stage& stage);

} // namespace moe::lower
