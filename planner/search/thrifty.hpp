// The plans of a request that need least memory, by everything that search may choose: what decides whether any fits.
#pragma once

#include "planner/search/search_space.hpp"

#include <optional>
#include <utility>
#include <vector>

namespace moe::search {

struct Thrifty {
    plan::Plan plan;
    double bytes = 0.0; // bytes as Estimator::memory_bytes()
};

// Of a mapping: one sequence per micro-batch where that is possible, and of cuts, recomputation, FSDP, graphs, overlap
// and offload what needs least, chosen one after another. With `enough` it stops at the first plan of no more bytes.
// Empty where no plan of the mapping is sound or has a price; `fault` says why it is unsound.
std::optional<Thrifty> thriftiest(const SearchSpace& space, const LayerOptions& family, const ParallelConfig& mapping,
                                  const stack::Stack& stack, Estimator& estimator, plan::PlanFault& fault,
                                  double enough = 0.0);

// Of all mappings, those first whose weights and optimizer states need least; some hundred are looked at. Empty where
// none is sound.
std::optional<Thrifty> thriftiest(const SearchSpace& space, const stack::Stack& stack, Estimator& estimator);

// A plan that fits into the memories of GPU and host; empty where none of those mappings has one.
std::optional<plan::Plan> fitting_plan(const SearchSpace& space, const stack::Stack& stack, Estimator& estimator);
std::optional<plan::Plan> fitting_plan(const SearchRequest& request, const stack::Stack& stack, Estimator& estimator);

// The fewest GPUs, from `from` up to `to`, for which the request has a plan that fits, and that plan: whole nodes, or
// the divisors of one. Of very many nodes one in 64 is looked at.
std::optional<std::pair<int, plan::Plan>> fewest_gpus(const SearchRequest& request, const stack::Stack& stack,
                                                      Estimator& estimator, std::int64_t from, std::int64_t to);

SearchRequest with_gpus(const SearchRequest& request, std::int64_t gpus);

} // namespace moe::search
