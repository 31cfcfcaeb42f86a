// The cheapest plans of a request over several numbers of GPUs, and by a deadline.
#pragma once

#include "planner/search/search.hpp"
#include "simulator/goodput/outlook.hpp"

#include <string>
#include <vector>

namespace moe::goodput {

// What a search with one number of GPUs gave.
struct Count {
    int gpus = 1;
    std::string no_plan;         // why there is none; empty where there is one
    search::Estimate estimate;   // of its cheapest plan,
    std::optional<Outlook> best; // whose outlook this is
};

struct Offers {
    search::SearchResult found;    // plans of all counts, cheapest first, at most as many as the request shows; its
                                   // figures are sums over the searches
    std::vector<Outlook> outlooks; // of those plans
    std::vector<Count> counts;     // that were searched, by number of GPUs
};

// search::refined_search() with each number of GPUs. GPU-hours rank, which are dollars at any price. With a deadline,
// plans that end behind it are left out. Throws Error (no_plan) where no count has a plan, where failures leave nothing
// of its time, and where none ends by the deadline: that names the nearest plan and what would do, more GPUs by another
// search.
Offers cheapest(const search::SearchRequest& request, const stack::Stack& stack, search::Estimator& estimator,
                const std::vector<int>& gpus, const Terms& terms);

// The same where the numbers of GPUs are not given but the deadline is. Tried are the fewest that a plan fits into and
// their doubles, up to `most`; left out are those that could not do it at the GPU's peak, and those that would have to
// be a quarter faster per GPU than the best before. Three quarters of the first that does it are tried as well. Ends
// where a count does it and is no cheaper than the one before. Where none could do it, the most GPUs that have a plan
// are the nearest that the Error names.
Offers cheapest_by_deadline(const search::SearchRequest& request, const stack::Stack& stack,
                            search::Estimator& estimator, int most, const Terms& terms);

} // namespace moe::goodput
