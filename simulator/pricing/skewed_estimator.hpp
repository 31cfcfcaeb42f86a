// Steps under skewed routing: an estimator that prices plans at one point of the skew, and the figures of all points.
#pragma once

#include "planner/stack/stack.hpp"
#include "simulator/pricing/fast_estimator.hpp"
#include "simulator/replay/simulate.hpp"
#include "simulator/routing/routing.hpp"

#include <memory>

namespace moe {

// FastEstimator for plans of any routing: distributions become the loads of `point`. Thread-safe.
class SkewedEstimator : public Estimator {
public:
    SkewedEstimator(std::shared_ptr<const Hardware> hardware, Stack stack, SkewPoint point = SkewPoint::mean);

    double memory_bytes(const Plan& plan) override;
    Estimate estimate(const Plan& plan) override;
    Estimate play(const Plan& plan) override;
    // Steps at a load below the plans', memory with balanced routing.
    std::unique_ptr<Quoter> quoter() override;

private:
    Estimate at_point(const Plan& plan, Estimate (FastEstimator::*price)(const Plan&));

    FastEstimator fast_;
    LoadTables tables_;
    SkewPoint point_;
};

// A plan's figures over the steps of its workload. tflops_per_gpu is that of the step at the same point, so that its
// p99 is the low one.
struct Skew {
    StepLoads loads;
    Quantiles step_seconds, tflops_per_gpu, memory_bytes;
};

// Event by event at each point; `mean` is simulate() of the plan, which is at the mean.
Skew skew_of(const Plan& plan, const Stack& stack, const Simulation& mean);

} // namespace moe
