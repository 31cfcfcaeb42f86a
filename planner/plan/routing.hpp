// A plan's routing: the spread of a workload's tokens over experts.
#pragma once

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

} // namespace moe::plan
