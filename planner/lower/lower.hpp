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
