// Steps under skewed routing: an estimator that prices plans at one point of the skew, and the figures of all points.
#pragma once

#include "planner/stack/stack.hpp"
#include "simulator/pricing/fast_estimator.hpp"
#include "simulator/pricing/replication.hpp"
#include "simulator/replay/simulate.hpp"
#include "simulator/routing/routing.hpp"

#include <memory>
#include <optional>

namespace moe::pricing {

// FastEstimator for plans of any routing: distributions become the loads of `point`. Thread-safe.
class SkewedEstimator : public search::Estimator {
public:
    SkewedEstimator(std::shared_ptr<const machine::Hardware> hardware, stack::Stack stack,
                    routing::SkewPoint point = routing::SkewPoint::mean);

    double memory_bytes(const plan::Plan& plan) override;
    search::Estimate estimate(const plan::Plan& plan) override;
    search::Estimate play(const plan::Plan& plan) override;
    // Steps at a load below the plans', memory with balanced routing.
    std::unique_ptr<search::BoundModel> bound_model() override;

private:
    search::Estimate at_point(const plan::Plan& plan, search::Estimate (FastEstimator::*price)(const plan::Plan&));

    FastEstimator fast_;
    routing::LoadTables tables_;
    routing::SkewPoint point_;
};

// A plan's figures over the steps of its workload. tflops_per_gpu is that of the step at the same point, so that its
// p99 is the low one.
struct Skew {
    routing::StepLoads loads;
    routing::Quantiles step_seconds, tflops_per_gpu, memory_bytes;
    std::optional<Replication> replication; // what copies of hot experts would give, in so many slots
};

// Event by event at each point; `mean` is simulate() of the plan, which is at the mean. `slots`: see replication_of().
Skew skew_of(const plan::Plan& plan, const stack::Stack& stack, const replay::Simulation& mean,
             int slots = usual_spare_slots);

} // namespace moe::pricing
