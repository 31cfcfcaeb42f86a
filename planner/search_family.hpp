// Search inside one family: every candidate priced, or counted under the reason that excludes it.
#pragma once

#include "planner/search_space.hpp"

#include <optional>
#include <utility>
#include <vector>

namespace moe {

using Ranked = std::pair<Plan, Estimate>;

// A total order: faster first, then by the plans' fields, so that results never depend on who came first.
bool better(const Ranked& a, const Ranked& b);

// The best plans so far, at most `most`, sorted.
class Podium {
public:
    explicit Podium(std::size_t most) : most_(most) {}
    bool add(Ranked ranked); // whether it entered
    // Step time that a plan must beat to enter; infinite while there is room.
    double worst() const;
    const std::vector<Ranked>& plans() const { return plans_; }

private:
    std::size_t most_;
    std::vector<Ranked> plans_;
};

struct FamilyResult {
    std::int64_t evaluated = 0;
    Rejections rejected;
    double least_memory = 0.0;    // bytes of the smallest candidate that did not fit; 0 = none
    std::optional<Plan> smallest; // that candidate
    std::vector<Ranked> found;    // plans that entered the podium when they were priced
};

// Prices the family's candidates against `incumbents`. Deterministic: the result depends on the arguments alone.
FamilyResult search_family(const SearchSpace& space, const Family& family, Estimator& estimator,
                           const Podium& incumbents, bool exhaustive);

} // namespace moe
