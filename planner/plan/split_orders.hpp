// Orders of pipeline ranks whose backwards are split into gradients of activations and gradients of weights.
#pragma once

#include "planner/plan/schedule.hpp"

#include <vector>

namespace moe::plan {

// The order of `rank` under zero_bubble (vpp 1, at least pp micro-batches), zb_v or dualpipe_v (vpp 2, at least 2*pp):
// what order() gives for these schedules. With forwards, dgrads and wgrads of equal length F = B = W per chunk a step
// of m micro-batches lasts 3m + (pp-1) F under ZB-H1, the drain being filled by wgrads, and 6m + (pp-1) F under ZB-V.
std::vector<Turn> split_order(ScheduleKind kind, int pp, int micro_batches, int rank);

} // namespace moe::plan
