// Seconds that the traffic of a flat bucket of weights takes: gathers, reductions, the optimizer.
#pragma once

#include "planner/program/op_attr.hpp"
#include "simulator/cost/cost.hpp"
#include "simulator/estimate/state_memory.hpp"
#include "simulator/estimate/step_model.hpp"

namespace moe {

// An op that exists only to be priced, over a tensor of the given type: of the step's begin and finish, or a message
// between stages. bytes: as Op::bytes.
OpCost price_op(const CostModel& model, OpKind kind, double bytes, Dtype dtype, Group group = {}, Attr attr = {});
double price_bytes(const CostModel& model, OpKind kind, double bytes, Dtype dtype, Group group = {}, Attr attr = {});

// Bytes that one optimizer step of this rank's shard moves.
double update_bytes(const Plan& plan, const BucketSize& bucket);
// What gathers and reductions of the bucket take; the rest is 0.
BucketTime moved(const CostModel& model, const BucketSize& bucket);
// zeroed: elements whose gradients are zeroed as a step begins.
BucketTime time_of(const CostModel& model, const BucketSize& bucket, std::int64_t zeroed);

} // namespace moe
