// EP overlap: the forward of one chunk beside the backward of another, played op by op.
#pragma once

#include "simulator/cost/cost.hpp"
#include "simulator/shapes.hpp"

namespace moe {

// Seconds of one merged pair among others like it. `lead` seconds that the host is ahead at the start make it
// max(ahead, together - lead) long.
struct MergedTime {
    double ahead = 0.0, together = 0.0;
    double forward_end = 0.0, backward_end = 0.0; // when each lane is through, the host being far ahead
    bool waits = false;                           // see SlotTime
    double lead_after = 0.0;
};

// Segments in forward order, with counts; all of the model's plan.
MergedTime play_merged(const CostModel& model, const Segments& forward, const Segments& backward);

} // namespace moe
