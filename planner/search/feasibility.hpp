// Feasibility, whether a request has any plan: the mappings that divisibility leaves, and the least memory that each
// can do with.
#pragma once

#include "planner/search/search_space.hpp"

#include <optional>
#include <string>
#include <vector>

namespace moe::search {

// The candidate of a mapping that needs least memory: one sequence per micro-batch where that is possible, the stack's
// deepest recomputation, the optimizer states with fewest bytes. Empty when that candidate is unsound; `fault` says
// why.
std::optional<plan::Plan> thriftiest(const SearchSpace& space, const LayerOptions& family,
                                     const ParallelConfig& mapping, plan::PlanFault& fault);

// A sound plan of the request that fits, of a mapping that tends to be fast where one of those does; looks at no more
// than a few thousand mappings. Empty when none of them fits.
std::optional<plan::Plan> fitting_plan(const SearchRequest& request, const stack::Stack& stack, Estimator& estimator);

// True where divisibility allows a plan, however much memory it needs.
bool has_plan(const SearchRequest& request, const stack::Stack& stack);

SearchRequest with_gpus(const SearchRequest& request, std::int64_t gpus);

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
    std::vector<Remedy> remedies;     // those that help: nearest value of each
};
// Explains a request that search() refuses.
Infeasibility explain_request(const SearchRequest& request, const stack::Stack& stack, Estimator& estimator);

} // namespace moe::search
