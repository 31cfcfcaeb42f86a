// A plan's routing: the spread of a workload's tokens over experts.
#pragma once

#include "planner/model/fwd.hpp"
#include "planner/plan/fwd.hpp"

#include <cstdint>
#include <string>

namespace moe::plan {

enum class RoutingKind : std::uint8_t {
    balanced,  // every expert gets the same number of rows
    dirichlet, // popularity of experts ~ Dirichlet(parameter, ..., parameter), drawn per layer
    zipf,      // popularity of the n-th expert ~ n^-parameter, experts in random order, drawn per layer
    load,      // the rank in question and its experts are given: see Routing::load and spread
    histogram, // popularity as in a recorded run: a file of token counts by layer and expert
};

struct Routing {
    RoutingKind kind = RoutingKind::balanced;
    double parameter = 0.0;
    // load: rows of the rank in question over those of a balanced load, in every MoE layer. The simulator turns
    // distributions into loads; what is lowered without that is balanced.
    double load = 1.0;
    double spread = 0.0; // load: standard deviation of the rows of its experts over their mean
    std::string path;
};

// "balanced", "dirichlet:A" (A > 0), "zipf:S" (S >= 0), "load:X" or "load:X:SPREAD" (X >= 1), or the path of a .json or
// .csv file. Throws Error (bad_input).
Routing routing_from_string(const std::string& text);
std::string to_string(const Routing& routing);
// Routing::load of the plan's routing.
double routed_load(const Plan& plan);

// The spread of a token's K experts over `buckets` equal parts of the experts: the expected number of distinct parts,
// under uniform routing within the kept expert groups. Hypergeometric; e.g. 256 experts, K 8, 8 of 8 parts: 5.29; with
// DeepSeek-V3's 4 of 8 groups: 4.00 (DeepEP and HybridEP send one copy per distinct destination).
double distinct_destinations(int experts, int top_k, int buckets, const model::Router& router);

} // namespace moe::plan
