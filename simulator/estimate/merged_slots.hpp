// Segments strung together and played op by op: layers in a row, and under EP overlap a forward beside a backward.
#pragma once

#include "simulator/cost/cost.hpp"
#include "simulator/estimate/stage_layouts.hpp"

#include <memory>

namespace moe::estimate {

// Seconds of one merged pair among others like it. `lead` seconds that the host is ahead at the start make it
// max(ahead, together - lead) long.
struct MergedTime {
    double ahead = 0.0, together = 0.0;
    double forward_end = 0.0, backward_end = 0.0; // seconds until each lane is through, the host being far ahead
    double forward_start = 0.0;                   // seconds until the forward begins to compute
    bool waits = false;                           // whether the host waits for routed counts on the way
    double lead_after = 0.0;                      // seconds that the host is ahead at the end, where it waits
    double issue = 0.0;                           // seconds that the host works, without its waits
};

// Plays pairs of chunks of one plan; each segment is lowered and priced once.
class MergedPlayer {
public:
    explicit MergedPlayer(const cost::CostModel& model); // the model must outlive the player
    ~MergedPlayer();

    // Segments in forward order, with counts.
    MergedTime play(const Segments& forward, const Segments& backward);

private:
    struct State;
    const cost::CostModel& model_;
    std::unique_ptr<State> state_; // since the first pair
};

} // namespace moe::estimate
