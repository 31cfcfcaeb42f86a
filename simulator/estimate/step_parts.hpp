// A plan's step model from cached segments and buckets.
#pragma once

#include "planner/plan/plan.hpp"
#include "simulator/estimate/step_model.hpp"

#include <vector>

namespace moe::estimate {

// Micro-batches to play of a plan that has many: two numbers, from which the rest follows linearly.
struct Probe {
    int shorter, longer;
    explicit Probe(const plan::Plan& plan)
        : shorter(3 * plan.pp + plan.micro_batches() % plan.pp), longer(shorter + plan.pp) {}
};

// Buckets of a stage of several. A bucket holds a whole chunk, so those of the segments add up, except where an MTP
// layer shares embedding or head with its neighbours.
std::vector<passes::BucketSize> stage_buckets(SegmentCache& cache, const plan::Plan& plan, const plan::Stage& stage,
                                              const Segments& segments);

// Slot times of every distinct stage, messages, and what opens and closes the step.
StepModel model_step(SegmentCache& cache, const Shape& shape, const plan::Plan& plan, Orders& orders);

// The times when each rank's gradient of the embedding table holds its copies' as well, which go around the holders; 0
// where there is nothing to add. ready: seconds by rank; hosts: what each rank's host has issued by then, moved on.
std::vector<double> tables_added(const StepModel& model, const std::vector<double>& ready,
                                 const std::vector<double*>& hosts);

} // namespace moe::estimate
