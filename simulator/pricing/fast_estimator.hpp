// The fast estimate: memoised segments, composed over the pipeline; microseconds per plan once its segments are known.
#pragma once

#include "planner/machine/fwd.hpp"
#include "planner/search/pricing.hpp"
#include "planner/stack/fwd.hpp"

#include <memory>

namespace moe::pricing {

// Thread-safe. Plans must be of the hardware given here and within the stack. Held to simulate() by a test: step time
// within 3 %, memory within 1 %. CPU plans of few ranks are simulated as they are.
class FastEstimator : public search::Estimator {
public:
    FastEstimator(std::shared_ptr<const machine::Hardware> hardware, stack::Stack stack);
    ~FastEstimator() override;

    // Bytes of everything that shares hardware.memory_bytes: one rank on GPUs, all ranks of the job on CPUs (where the
    // Estimate's memory_bytes stays that of the fullest rank).
    double memory_bytes(const plan::Plan& plan) override;
    search::Estimate estimate(const plan::Plan& plan) override;
    // Plays a step as simulate() does; of many micro-batches it plays a few that the others repeat.
    search::Estimate play(const plan::Plan& plan) override;
    std::unique_ptr<search::BoundModel> bound_model() override;

private:
    double held_bytes(const plan::Plan& plan);                               // bytes without the step that is run again
    search::Estimate priced(const plan::Plan& plan, search::Estimate timed); // adds its memory and rates
    struct State;
    std::unique_ptr<State> state_;
};

} // namespace moe::pricing
