// The cost of a segment in either direction when it is the only work of a rank, and the times when it uses its buckets.
#pragma once

#include "planner/search/pricing.hpp"
#include "simulator/cost/cost.hpp"
#include "simulator/estimate/stage_layouts.hpp"
#include "simulator/replay/max_plus.hpp"

#include <cstdint>
#include <vector>

namespace moe::estimate {

// One direction of a segment, played alone.
struct SegmentTime {
    replay::MaxPlusMatrix max_plus;
    double device = 0.0;     // seconds among others like it, the host being far ahead
    search::Breakdown parts; // parts of `device`
};

// The times when a segment uses the parameters of one bucket: its clocks at the end of its forward when the weights are
// there at 0 and everything else long before, those at the end of its backward when the gradients have been zeroed at
// 0, and the seconds from the last addition to the gradients to the end of the backward, the host being far ahead.
struct BucketUse {
    passes::BucketSize bucket; // the bucket of the segment alone
    replay::StreamClocks after_weights, after_zero;
    double after_final = 0.0;
    std::int64_t zeroed = 0; // elements whose gradients no product sets, see passes/first_gradients
};

struct SegmentCost {
    SegmentTime forward, backward;
    SegmentTime first_backward;  // the first backward of a step, whose products set gradients
    std::vector<BucketUse> uses; // uses in the order of declaration
    // Delayed scaling: the clocks at the end of the forward when the largest magnitudes of weights are there at 0 and
    // everything else long before, since rows report theirs into the same list.
    replay::StreamClocks after_scales = replay::no_clocks;
};

// Lowers the segment for the model's plan and plays it.
SegmentCost segment_cost(const cost::CostModel& model, SegmentId id);

} // namespace moe::estimate
