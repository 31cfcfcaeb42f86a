// The exploration of a space: a search before it refuses, bounded by step seconds, or near a plan that is known.
#pragma once

#include "planner/base/parallel.hpp"
#include "planner/search/search_refusal.hpp"
#include "planner/search/top_k.hpp"

#include <limits>

namespace moe::search {

struct Exploration {
    SearchResult result; // no plans where none fits
    SearchFailure failure;
};
// What search() does before it refuses, of the plans whose steps take less than `slowest` seconds.
// by_micro_batch: a mapping has a place for each size. Throws Error (bad_input) for a request of no plans.
Exploration explore(const SearchRequest& request, const SearchSpace& space, Estimator& estimator, Workers& workers,
                    double slowest = std::numeric_limits<double>::infinity(), bool by_micro_batch = false);

// explore() for a plan that is known: where it has a choice, plans take what it takes, elsewhere what there is. Plans
// of one mapping that differ in the micro-batch may all have places.
SearchResult explore_like(const plan::Plan& known, const SearchRequest& request, const stack::Stack& stack,
                          Estimator& estimator, Workers& workers, double slowest);

} // namespace moe::search
