// Search: the plan space of a request, every candidate evaluated or counted under the reason that excludes it.
#pragma once

#include "planner/plan/plan.hpp"
#include "planner/search/pricing.hpp"
#include "planner/stack/fwd.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace moe::search {

struct SearchRequest {
    plan::Plan base;                                        // model, hardware, stack, gpus, seq, gbs and defaults
    std::vector<machine::Precision> precisions;             // empty: bf16 (fp32 where bf16 has no peak)
    std::vector<std::pair<std::string, std::string>> fixed; // --fix FIELD=VALUE in order
    int top = 5;
    int threads = 0;         // 0: as many as the machine has
    bool similar = false;    // plans of one mapping (tp, cp, dp, pp, ep, etp) may all be listed, not only its best
    bool exhaustive = false; // price every plan that fits: nothing is excluded by a bound or as dominated
    std::function<void(std::int64_t evaluated, std::int64_t pruned)> progress; // may be empty
};

struct SearchResult {
    std::int64_t evaluated = 0;                 // candidates whose bound fits
    std::int64_t priced = 0;                    // candidates of them that the estimator priced, as they could still win
    std::map<std::string, std::int64_t> pruned; // reason -> candidates
    double seconds = 0.0;
    std::vector<std::pair<plan::Plan, Estimate>> plans; // fastest first, at most `top`
};

// Explores TP, CP, EP, ETP, PP, VPP, DP, MBS, layout, recompute, precision and what else the stack offers. Throws
// Error (no_plan) when nothing remains, naming the reason that excluded most and the smallest change that would help.
SearchResult search(const SearchRequest& request, const stack::Stack& stack, Estimator& estimator);

} // namespace moe::search
