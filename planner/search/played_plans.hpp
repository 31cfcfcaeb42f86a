// Plans that a search has played event by event, each distinct one once: several ways lead to the same plan.
#pragma once

#include "planner/plan/plan.hpp"
#include "planner/search/pricing.hpp"

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace moe::search {

// For plans of one model, machine, stack and workload. The estimator must outlive it, and is called from so many
// threads.
class PlayedPlans {
public:
    PlayedPlans(Estimator& estimator, std::size_t threads) : estimator_(estimator), threads_(threads) {}

    // Estimator::play() of each plan. Nothing for plans that do not fit into the GPU, and for those that have no price.
    std::vector<std::optional<Estimate>> of(const std::vector<plan::Plan>& plans);

private:
    std::optional<Estimate> play(const plan::Plan& plan) const;

    Estimator& estimator_;
    std::size_t threads_;
    std::map<std::string, std::optional<Estimate>> known_; // by the plan's fields
};

} // namespace moe::search
