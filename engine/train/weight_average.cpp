// The average's beginning and its steps, a piece of the masters at a time.
#include "engine/train/weight_average.hpp"

#include "planner/program/program.hpp"

#include <algorithm>

namespace moe::train {

void WeightAverage::start(const program::Program& program, const device::Arena& arena) {
    shards_.clear();
    for (const program::Bucket& bucket : program.buckets) {
        std::vector<float>& shard = shards_.emplace_back(static_cast<std::size_t>(bucket.elements / bucket.group_size));
        arena.device().read(shard.data(), arena.at(bucket.kept_master()), shard.size() * sizeof(float));
    }
}

void WeightAverage::follow(const program::Program& program, const device::Arena& arena, double decay) {
    constexpr std::size_t most = std::size_t{1} << 20; // elements copied at once
    const auto share = static_cast<float>(1.0 - decay);
    for (std::size_t b = 0; b < shards_.size(); ++b) {
        std::vector<float>& shard = shards_[b];
        const auto* master = arena.as<float>(program.buckets[b].kept_master());
        for (std::size_t first = 0; first < shard.size(); first += most) {
            masters_.resize(std::min(most, shard.size() - first));
            arena.device().read(masters_.data(), master + first, masters_.size() * sizeof(float));
            for (std::size_t i = 0; i < masters_.size(); ++i)
                shard[first + i] += share * (masters_[i] - shard[first + i]);
        }
    }
}

} // namespace moe::train
