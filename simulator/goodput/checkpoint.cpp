// Adds up the buckets of every pipeline rank.
#include "simulator/goodput/checkpoint.hpp"

#include "planner/lower/lower.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/schedule.hpp"
#include "planner/plan/stack_traits.hpp"

#include <algorithm>
#include <vector>

namespace moe::goodput {

double checkpoint_bytes(const plan::Plan& plan) {
    const bool own = plan::stack_traits(plan).engine == plan::StackEngine::own;
    const double weights = own || plan.precision == machine::Precision::fp32 ? 0.0 : 2.0; // of one element
    std::vector<double> bytes(static_cast<std::size_t>(plan.pp), 0.0);
    const std::vector<plan::Stage> stages = plan::stages(plan);
    for (std::size_t s = 0; s < stages.size(); ++s)
        for (const passes::BucketSize& bucket : lower::bucket_sizes(plan, stages[s]))
            bytes[static_cast<std::size_t>(plan::rank_of_stage(plan.schedule, plan.pp, static_cast<int>(s)))] +=
                (bucket.frozen ? passes::weight_bytes(bucket) : passes::optimizer_bytes(plan, bucket)) +
                weights * static_cast<double>(bucket.elements) / bucket.group_size;
    return *std::max_element(bytes.begin(), bytes.end());
}

} // namespace moe::goodput
