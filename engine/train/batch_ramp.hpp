// A global batch that grows over the first samples of a run.
#pragma once

#include "planner/plan/fwd.hpp"

#include <cstdint>
#include <string>

namespace moe::train {

// Megatron-LM's ramp-up (num_microbatches_calculator.py, --rampup-batch-size): with n = (gbs - start) / increment, a
// step behind c samples takes start + floor(c n / samples) increment of them, and gbs where c is above `samples`.
struct BatchRamp {
    std::int64_t start = 0, increment = 0, samples = 0; // start 0: every step takes the plan's batch
    bool on() const { return start > 0; }
    std::int64_t batch(std::int64_t consumed, std::int64_t gbs) const;
    std::int64_t steps(std::int64_t gbs) const; // those that take less than gbs
};

// "START,INCREMENT,SAMPLES". Throws Error (bad_input).
BatchRamp batch_ramp(const std::string& text);
// The plan with the batch of a step.
plan::Plan with_batch(plan::Plan plan, std::int64_t batch);
// Throws Error (bad_input) where the plan cannot run one of the batches, or is one that ramp-up does not go with.
void check_ramp(const BatchRamp& ramp, const plan::Plan& plan);

} // namespace moe::train
