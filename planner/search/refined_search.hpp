// A search whose plans are played event by event, beside what its closed forms do not hold: offload and split
// backwards.
#pragma once

#include "planner/search/search.hpp"

namespace moe::search {

// search(), then on GPUs, by Estimator::play():
// - its plans themselves;
// - their backwards in two slots (`Stack::split_schedules`);
// - where the stack offloads, the best plans of GPUs with more memory, brought back into this memory by those offloaded
//   modules that move fewest bytes: they recompute less, or split weights over fewer ranks;
// - all of these with delayed weight gradients.
// The fastest plan of each mapping stays. A field that the request pins stays as it is. Throws as search() does where
// offload does not help either.
SearchResult refined_search(const SearchRequest& request, const stack::Stack& stack, Estimator& estimator);

} // namespace moe::search
