// Prices of a plan: the figures of an estimate, and the two interfaces by which search asks for them.
#pragma once

#include "planner/plan/fwd.hpp"

#include <memory>
#include <vector>

namespace moe::search {

struct Breakdown { // seconds of the step on the pipeline rank that waits least; they add up to step_seconds
    double compute = 0.0, tensor = 0.0, context = 0.0, expert = 0.0, pipeline = 0.0, bubble = 0.0, data = 0.0,
           optimizer = 0.0, recompute = 0.0, host = 0.0;
    double neighbours = 0.0; // what residuals of runs nearby add to all others; may be negative
};

struct Estimate {
    double step_seconds = 0.0;
    double tflops_per_gpu = 0.0; // model FLOPs
    double tokens_per_second_per_gpu = 0.0;
    double memory_bytes = 0.0; // peak over ranks, constants included
    double host_bytes = 0.0;   // bytes of a rank's offloaded tensors on the host; 0 in closed forms
    bool fits = true;          // both are within the hardware's memories
    Breakdown breakdown;
};

// The closed form of an estimate: neither number lies above the estimate's by more than the margins below.
struct LowerBound {
    double step_seconds = 0.0;
    double memory_bytes = 0.0; // bytes as Estimator::memory_bytes()
};

// Relative tolerances: bound <= (1 + margin) * estimate; see tests/simulator/bound/bound_test.cpp.
inline constexpr double bound_time_margin = 0.0075, bound_memory_margin = 0.002;

// Bounds plans from two parts that are worked out once each: what one micro-batch costs in each kind of layer, and how
// layers and batch are cut. Handles hold until forget(). For one thread and one search: its plans differ in what
// SearchSpace varies. All throw Error (bad_input) for what cannot be priced.
class BoundModel {
public:
    virtual ~BoundModel() = default;
    // A handle of the layers' costs, which depend on every field but pp, vpp, dp, edp, layout, schedule and optimizer;
    // on those only as far as they place the groups of the layers' communication, see placement().
    virtual int layer_costs(const plan::Plan& plan) = 0;
    // A handle of the cut into stages, which depends on pp, vpp, dp, edp, layout, schedule, optimizer, and the fields
    // that weights depend on: degrees and precisions.
    virtual int stage_split(const plan::Plan& plan) = 0;
    virtual LowerBound bound(int layers, int stages) = 0;
    // Nearer to the estimate of a plan whose forwards and backwards run side by side than bound(), and dearer: step
    // seconds; 0 where that tells no more.
    virtual double merged_step_bound(const plan::Plan& plan) = 0;

    // Step seconds below which no cut of these layers goes, all ranks being busy all the time.
    virtual double step_bound(int layers) = 0;
    // A step_bound() for any CUDA graphs and any recomputation, cheaper and lower.
    virtual double early_step_bound(const plan::Plan& plan) = 0;
    // A handle as from layer_costs(), as cheap: its bounds are floors with any CUDA graphs and any recomputation.
    virtual int early_layer_costs(const plan::Plan& plan) = 0;
    // A handle as from early_layer_costs(), dearer and nearer: it knows the kind of layer that the model has most of,
    // with the plan's CUDA graphs. Seconds within the margin of estimates with any recomputation.
    virtual int near_layer_costs(const plan::Plan& plan) = 0;
    // A handle as from layer_costs(), cheaper for FSDP: its bounds are no greater.
    virtual int coarse_layer_costs(const plan::Plan& plan) = 0;
    // If every entry of key(a) is <= that of key(b), plan a is at least as fast as plan b for every stage split. Holds
    // for plans without recomputation and with equal EP overlap.
    virtual std::vector<double> dominance_key(int layers) = 0;
    // Bytes below which no cut with the plan's pp, dp and edp goes: weights, gradients and optimizer states spread
    // evenly over the ranks.
    virtual double least_bytes(const plan::Plan& plan) = 0;
    // Bytes that the plan keeps of each decoder layer and micro-batch under way, whatever is recomputed: its input.
    virtual double kept_bytes(const plan::Plan& plan) = 0;
    // Plans of equal number that differ in pp, dp and edp alone have the same layer_costs(), if all or none have a
    // pipeline.
    virtual int placement(const plan::Plan& plan) = 0;
    virtual void forget() = 0;
};

// Prices a sound plan. The planner knows no durations: the simulator implements this. Search calls its functions from
// several threads at once.
class Estimator {
public:
    virtual ~Estimator() = default;
    virtual double memory_bytes(const plan::Plan& plan) = 0; // closed form, cheap
    virtual Estimate estimate(const plan::Plan& plan) = 0;   // throws Error (bad_input) for what it cannot price
    // The estimate played event by event, dearer, for the few plans that are shown; by default estimate() itself.
    virtual Estimate play(const plan::Plan& plan) { return estimate(plan); }
    // The lower bounds of this estimator's plans; the estimator must outlive them. By default they are its estimates.
    virtual std::unique_ptr<BoundModel> bound_model();
};

} // namespace moe::search
