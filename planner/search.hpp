// Search: the plan space of a request, every candidate evaluated or counted under the reason that excludes it.
#pragma once

#include "planner/plan.hpp"
#include "planner/stack.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace moe {

struct Breakdown { // seconds of the step on the slowest pipeline rank's critical path; they add up to step_seconds
    double compute = 0.0, tensor = 0.0, context = 0.0, expert = 0.0, pipeline = 0.0, bubble = 0.0, data = 0.0,
           optimizer = 0.0, recompute = 0.0, host = 0.0;
};

struct Estimate {
    double step_seconds = 0.0;
    double tflops_per_gpu = 0.0; // model FLOPs
    double tokens_per_second_per_gpu = 0.0;
    double memory_bytes = 0.0; // peak over ranks, constants included
    bool fits = true;          // memory_bytes <= hardware memory
    Breakdown breakdown;
};

// Prices a sound plan. The planner knows no durations: the simulator implements this. Search calls both functions from
// several threads at once.
class Estimator {
public:
    virtual ~Estimator() = default;
    virtual double memory_bytes(const Plan& plan) = 0; // closed form, cheap
    virtual Estimate estimate(const Plan& plan) = 0;   // throws Error (bad_input) for what it cannot price
};

struct SearchRequest {
    Plan base;                                              // model, hardware, stack, gpus, seq, gbs and defaults
    std::vector<Precision> precisions;                      // empty: bf16 (fp32 where bf16 has no peak)
    std::vector<std::pair<std::string, std::string>> fixed; // --fix FIELD=VALUE in order
    int top = 5;
    int threads = 0;         // 0: as many as the machine has
    bool exhaustive = false; // price every plan that fits: nothing is excluded by a bound or as dominated
    std::function<void(std::int64_t evaluated, std::int64_t pruned)> progress; // may be empty
};

struct SearchResult {
    std::int64_t evaluated = 0;
    std::map<std::string, std::int64_t> pruned; // reason -> candidates
    double seconds = 0.0;
    std::vector<std::pair<Plan, Estimate>> plans; // fastest first, at most `top`
};

// Explores TP, CP, EP, ETP, PP, VPP, DP, MBS, schedule, recompute, precision and what else the stack offers. Throws
// Error (bad_input) when nothing remains, naming the reason that excluded most and the smallest change that would help.
SearchResult search(const SearchRequest& request, const Stack& stack, Estimator& estimator);

} // namespace moe
