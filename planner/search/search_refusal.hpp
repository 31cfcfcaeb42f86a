// The one line for a request that no plan satisfies: which reason excluded most, and the smallest change that would
// help.
#pragma once

#include "planner/search/search_space.hpp"

#include <optional>

namespace moe::search {

struct SearchFailure {
    Rejections rejected;
    double least_memory = 0.0;          // bytes of the smallest candidate that did not fit
    std::optional<plan::Plan> smallest; // plan of that candidate, if memory excluded any

    void note(const plan::Plan& plan, double bytes) {
        if (smallest && bytes >= least_memory) return;
        least_memory = bytes;
        smallest = plan;
    }
};

// Throws Error (no_plan). Looks for a number of GPUs that would do, hence the estimator.
[[noreturn]] void refuse_search(const SearchRequest& request, const stack::Stack& stack, Estimator& estimator,
                                const SearchSpace& space, const SearchFailure& failure);

} // namespace moe::search
