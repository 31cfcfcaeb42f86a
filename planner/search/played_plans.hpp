// Plans that a search has played event by event, each distinct one once: several ways lead to the same plan.
#pragma once

#include "planner/base/parallel.hpp"
#include "planner/plan/plan.hpp"
#include "planner/search/pricing.hpp"

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace moe::search {

// For plans of one model, machine, stack and workload. Estimator and workers must outlive it.
class PlayedPlans {
public:
    PlayedPlans(Estimator& estimator, Workers& workers) : estimator_(estimator), workers_(workers) {}

    // Estimator::play() of each plan. Nothing for plans that do not fit into the GPU, and for those that have no price.
    std::vector<std::optional<Estimate>> of(const std::vector<plan::Plan>& plans);

private:
    std::optional<Estimate> play(const plan::Plan& plan) const;

    Estimator& estimator_;
    Workers& workers_;
    std::map<std::string, std::optional<Estimate>> known_; // by the plan's fields
};

} // namespace moe::search
