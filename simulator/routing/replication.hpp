// Expert replication: copies of hot experts in spare slots of other ranks take over tokens until ranks are balanced.
//
// This is what balancers do that look at the tokens of each layer (UltraEP, arXiv 2606.04101; before it EPLB): routing
// and results stay what they are, since a copy computes what its expert would.
#pragma once

#include "simulator/routing/routing.hpp"

#include <vector>

namespace moe::routing {

// A layer whose hot experts have copies.
struct Replicated {
    std::vector<double> loads; // by rank, in the unit of the shares
    int copies = 0;            // in all
    int most_sent = 0;         // copies that leave the rank which sends most
    double spread =
        0.0; // over experts and copies of the hottest rank: standard deviation of their tokens over the mean
};

// share: tokens by expert; rank r of `ranks` has the r-th part of the experts and `slots` spare ones. Copies stay
// within runs of `near` ranks, those of one NVLink domain. Finds the least load that no rank has to exceed, within a
// hundredth of the mean, and the copies for it: from the rank that has most to give, hottest experts first, each to the
// rank with most room. Fewer copies go before the last hundredth. Loads without copies where slots is 0.
Replicated replicate(const std::vector<double>& share, int ranks, int slots, int near);

// Draws of one layer's loads as draw_layer_loads() has them, with copies; and of the copies, means over the draws.
struct ReplicatedLoads {
    LayerLoads loads;
    double copies = 0.0, most_sent = 0.0;
};
ReplicatedLoads draw_replicated_loads(const plan::Routing& routing, int experts, int top_k, int ranks,
                                      const std::vector<std::vector<double>>& counts, int slots, int near);

} // namespace moe::routing
