// The best plans so far, one of each mapping.
#pragma once

#include "planner/plan/plan.hpp"
#include "planner/search/pricing.hpp"

#include <array>
#include <utility>
#include <vector>

namespace moe::search {

using Ranked = std::pair<plan::Plan, Estimate>;

// A total order: faster first, then by the plans' fields, so that results never depend on who came first.
bool better(const Ranked& a, const Ranked& b);

// The degrees by which near-equal plans are told apart: of plans that differ in chunks, micro-batch, layout and
// switches alone, only the best is worth a place.
using ParallelConfigKey = std::array<int, 6>; // tp, cp, dp, pp, ep, etp
ParallelConfigKey parallel_config_of(const plan::Plan& plan);

class TopK {
public:
    // `similar`: plans of one mapping may all have places.
    TopK(std::size_t most, bool similar) : most_(most), similar_(similar) {}
    void add(Ranked ranked);
    // Step time from which on a plan of this mapping changes nothing; infinite while there is room.
    double limit(const ParallelConfigKey& mapping) const;
    // The largest of all limits.
    double worst() const;
    const std::vector<Ranked>& plans() const { return plans_; } // sorted, at most `most`

private:
    std::size_t most_;
    bool similar_;
    std::vector<Ranked> plans_;
};

} // namespace moe::search
