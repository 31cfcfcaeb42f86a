// The best plans so far, one of each mapping.
#pragma once

#include "planner/plan/plan.hpp"
#include "planner/search/pricing.hpp"

#include <array>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

namespace moe::search {

using Ranked = std::pair<plan::Plan, Estimate>;

// A total order: faster first, then by the plans' fields, so that results never depend on who came first.
bool better(const Ranked& a, const Ranked& b);

// The degrees by which near-equal plans are told apart: of plans that differ in chunks, micro-batch, layout and
// switches alone, only the best is worth a place.
using ParallelConfigKey = std::array<std::int64_t, 7>; // tp, cp, dp, pp, ep, etp; and mbs, for who asks for it
ParallelConfigKey parallel_config_of(const plan::Plan& plan);

class TopK {
public:
    // `similar`: plans of one mapping may all have places. `slowest`: no plan from these step seconds on is of
    // interest.
    // `by_micro_batch`: those that differ in its size may.
    TopK(std::size_t most, bool similar, double slowest = std::numeric_limits<double>::infinity(),
         bool by_micro_batch = false)
        : most_(most), similar_(similar), by_micro_batch_(by_micro_batch), slowest_(slowest) {}
    void add(Ranked ranked);
    // Step time from which on a plan of this mapping changes nothing; `slowest` while there is room.
    double limit(const ParallelConfigKey& mapping) const;
    // The largest of all limits.
    double worst() const;
    std::size_t most() const { return most_; }
    // What only one plan has a place of.
    ParallelConfigKey place_of(ParallelConfigKey mapping) const {
        if (!by_micro_batch_) mapping.back() = 0;
        return mapping;
    }
    const std::vector<Ranked>& plans() const { return plans_; } // sorted, at most `most`

private:
    std::size_t most_;
    bool similar_, by_micro_batch_;
    double slowest_;
    std::vector<Ranked> plans_;
};

} // namespace moe::search
