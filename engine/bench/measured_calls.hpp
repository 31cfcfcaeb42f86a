// Op times of trainings by family and shape: what hardware profiles hold as measured calls.
#pragma once

#include "planner/machine/hardware.hpp"
#include "planner/program/fwd.hpp"
#include "planner/program/op.hpp"

#include <map>
#include <string>
#include <vector>

namespace moe::bench {

using CallSamples = std::map<std::string, std::vector<machine::MeasuredCall>>; // calls by measured_key()

// Whether an op of a training with this offload takes the time of such an op alone. Copies to the host do. What runs
// beside them does not: short ops wait up to 30 us for the copies' writes (an H100, 2026-11-27).
bool has_own_time(program::OpKind kind, unsigned offload);

// clock_hz: that the device held meanwhile, 0 where it does not say.
void add_sample(CallSamples& samples, const program::Op& op, const program::Program& program, double seconds,
                double clock_hz);

// One call for all samples between which there is no difference, their mean, because predictions add ops up; sorted by
// work. Its clock is known where those of all are. by_shape: on a device of its own an op's time hardly scatters, and
// its shape decides. Ranks that share cores disturb each other by more than that: their calls lose their sides and are
// averaged over bins of like work.
std::vector<machine::MeasuredCall> calls_of(std::vector<machine::MeasuredCall> samples, bool by_shape);

// The calls of a family with those of later trainings, both of calls_of(): of one shape, or of like work where they
// have no sides, the later ones stand. Throws Error (bad_input) where one has other sides than the other.
std::vector<machine::MeasuredCall> with_later(const std::string& key, std::vector<machine::MeasuredCall> calls,
                                              const std::vector<machine::MeasuredCall>& later);

} // namespace moe::bench
