// Lowering: a plan becomes the Program of each kind of rank, or the ops of one layer alone.
#pragma once

#include "planner/program.hpp"

namespace moe {

// The Program of every rank of pipeline stage `pipeline_rank` of a sound plan (check_plan). Throws Error (bad_input) for
// a combination that has no lowering, naming the field.
Program lower(const Plan& plan, int pipeline_rank);

// What lies between two stage boundaries, for the fast estimate: one decoder layer of a kind, or the ends of the model.
enum class SegmentKind : std::uint8_t { embedding, layer, mtp, head };
// A Program with one chunk that holds only the segment: template 0 is its forward, template 1 its backward, no slots.
Program lower_segment(const Plan& plan, SegmentKind segment, int layer_kind = 0);

// Ops of the begin and finish templates alone (gradient reduction, optimizer) for given bucket sizes are part of lower();
// the fast estimate prices them from the bucket list that parameters_of() gives without lowering any layer.
struct BucketSize {
    Domain domain = Domain::dense;
    bool sharded = false;  // split over TP/ETP (its group then lacks that axis)
    std::int64_t elements = 0;
    int group_size = 1;
    Group group;
};
std::vector<BucketSize> bucket_sizes(const Plan& plan, const Stage& stage);

}  // namespace moe
