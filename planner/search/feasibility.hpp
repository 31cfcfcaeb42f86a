// Feasibility, whether a request has any plan: the mappings that divisibility leaves, and the least memory that each
// can do with.
#pragma once

#include "planner/search/thrifty.hpp"

#include <string>
#include <vector>

namespace moe::search {

// True where divisibility allows a plan, however much memory it needs.
bool has_plan(const SearchRequest& request, const stack::Stack& stack);

// The reason that keeps a request from having a plan.
struct Obstacle {
    std::string constraint; // name by which search counts it
    std::int64_t candidates = 0;
    std::string example; // the message of one of them
};
struct TightConfig { // sound, but too large
    plan::Plan plan;
    double memory_bytes = 0.0;
};
// One change of the request alone.
struct Remedy {
    std::string what, from, to; // "gpus", "16", "32"; "fix pp", "2", "open"
    plan::Plan plan;            // a plan that fits then
    double memory_bytes = 0.0;
};
struct Infeasibility {
    std::vector<Obstacle> obstacles;  // most candidates first
    std::vector<TightConfig> closest; // the mappings that need least, ascending; at most ten
    std::vector<Remedy> remedies;     // remedies that help: nearest value of each
};
// Explains a request that search() refuses.
Infeasibility explain_request(const SearchRequest& request, const stack::Stack& stack, Estimator& estimator);

} // namespace moe::search
