// Seconds that a step's ops with a flat bucket of weights take: gathers, reductions, the optimizer.
#pragma once

#include "planner/program/op_attr.hpp"
#include "simulator/cost/cost.hpp"
#include "simulator/estimate/state_memory.hpp"
#include "simulator/estimate/step_model.hpp"

namespace moe::estimate {

// An op that exists only to be priced, over a tensor of the given type: of the step's begin and finish, or a message
// between stages. bytes: as Op::bytes.
cost::OpCost price_op(const cost::CostModel& model, program::OpKind kind, double bytes, program::Dtype dtype,
                      plan::Group group = {}, program::Attr attr = {});
double price_bytes(const cost::CostModel& model, program::OpKind kind, double bytes, program::Dtype dtype,
                   plan::Group group = {}, program::Attr attr = {});

// All ops of this work with the bucket; 0 where it has none.
double seconds_of(const cost::CostModel& model, const passes::BucketSize& bucket, passes::StepWork work);
// zeroed: elements whose gradients are zeroed as a step begins.
BucketTime time_of(const cost::CostModel& model, const passes::BucketSize& bucket, std::int64_t zeroed);

} // namespace moe::estimate
