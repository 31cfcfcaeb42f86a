// The rule of ramp-up, and what it asks of a plan.
#include "engine/train/batch_ramp.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "planner/plan/overflow_retry.hpp"
#include "planner/plan/plan.hpp"

#include <array>
#include <charconv>

namespace moe::train {

std::int64_t BatchRamp::batch(std::int64_t consumed, std::int64_t gbs) const {
    if (!on() || consumed > samples) return gbs;
    const std::int64_t increments = (gbs - start) / increment;
    // Megatron divides in floating point; so far as a double holds the quotient the floor is the same.
    return start + static_cast<std::int64_t>(static_cast<double>(consumed) /
                                             (static_cast<double>(samples) / static_cast<double>(increments))) *
                       increment;
}

std::int64_t BatchRamp::steps(std::int64_t gbs) const {
    std::int64_t count = 0;
    for (std::int64_t consumed = 0; batch(consumed, gbs) < gbs; consumed += batch(consumed, gbs)) ++count;
    return count;
}

BatchRamp batch_ramp(const std::string& text) {
    std::array<std::int64_t, 3> numbers{};
    const char *at = text.data(), *const end = at + text.size();
    for (std::size_t i = 0; i < numbers.size(); ++i) {
        const auto [last, error] = std::from_chars(at, end, numbers[i]);
        const bool whole = i + 1 < numbers.size() ? last != end && *last == ',' : last == end;
        if (error != std::errc{} || !whole || numbers[i] < 1)
            refuse("--rampup-batch-size {}: must be START,INCREMENT,SAMPLES, three whole numbers above 0", shown(text));
        if (i + 1 < numbers.size()) at = last + 1;
    }
    return {numbers[0], numbers[1], numbers[2]};
}

plan::Plan with_batch(plan::Plan plan, std::int64_t batch) {
    plan.gbs = batch;
    return plan;
}

void check_ramp(const BatchRamp& ramp, const plan::Plan& plan) {
    if (!ramp.on()) return;
    const std::string said = fmt::format("--rampup-batch-size {},{},{}", ramp.start, ramp.increment, ramp.samples);
    if (ramp.start >= plan.gbs)
        refuse("{}: starts with {} samples, the plan's gbs is {}: start below", said, ramp.start, plan.gbs);
    if ((plan.gbs - ramp.start) % ramp.increment != 0)
        refuse("{}: from {} to gbs = {} are {} samples, which {} does not divide", said, ramp.start, plan.gbs,
               plan.gbs - ramp.start, ramp.increment);
    for (std::int64_t batch = ramp.start; batch < plan.gbs; batch += ramp.increment)
        if (const plan::PlanFault fault = plan::check_plan(with_batch(plan, batch)))
            refuse("{}: a batch of {}: {}", said, batch, fault.message);
    if (plan::may_overflow(plan))
        refuse("{}: steps that overflow are run again with the plan's batch alone: set capacity none", said);
    if (plan.router.aux_loss > 0.0 && plan.router.load_balancing == plan::LoadBalancing::global)
        refuse("{}: global_aux_loss takes the load of the step before, of another batch: set load_balancing "
               "seq_aux_loss",
               said);
}

} // namespace moe::train
