// An exponential moving average of a rank's master weights, in the host's memory.
#pragma once

#include "engine/device/arena.hpp"
#include "planner/program/fwd.hpp"

#include <cstddef>
#include <vector>

namespace moe::train {

// FP32 averages of the shards that a rank holds, as long as the shards. Elements are averaged one by one, so that every
// plan and every back end has the same bits for the same weights.
class WeightAverage {
public:
    // The average begins as the weights are.
    void start(const program::Program& program, const device::Arena& arena);
    // average += (1 - decay) (weight - average), behind a step that moved the weights. Copies the masters from a
    // device.
    void follow(const program::Program& program, const device::Arena& arena, double decay);

    bool started() const { return !shards_.empty(); }
    // The shard of a bucket: [elements / group_size].
    const float* of(std::size_t bucket) const { return shards_[bucket].data(); }
    float* of(std::size_t bucket) { return shards_[bucket].data(); }

private:
    std::vector<std::vector<float>> shards_; // by bucket
    std::vector<float> masters_;             // on their way from the device
};

} // namespace moe::train
