// Branches of a search: plans that share degrees, micro-batch size and place on the machine; surveyed, then bounded.
#pragma once

#include "planner/search/search_space.hpp"
#include "planner/search/top_k.hpp"

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace moe::search {

// One cut of the layers and of the batch.
struct NodeShape {
    const ParallelConfig* parallel_config = nullptr;
    const StageSplit* stage_split = nullptr;
    int vpp = 1;
};

struct SearchNode {
    // A root: one combination of the options that search chooses for layers (SearchSpace::roots()). Its plans differ in
    // shape, recompute set and optimizer alone.
    struct Root {
        double floor = 0.0; // step seconds below which no plan of this root goes
        std::uint16_t index = 0;
        std::uint16_t like = 0; // index of the first root that differs in CUDA graphs at most
    };
    const LayerOptions* layer_options = nullptr;
    std::int64_t mbs = 1;
    std::shared_ptr<const std::vector<NodeShape>> shapes; // shapes of mappings whose groups lie alike
    std::vector<std::uint16_t> divided;                   // indices of shapes that this micro-batch size goes with
    std::vector<Root> roots;                              // roots by index
    double floor = 0.0;                                   // least floor of the roots
};

// A plan that may win, in few bytes, since a search may have a million.
struct Candidate {
    double seconds = 0.0; // lower bound of its step; 0 = not bounded
    std::int64_t mbs = 1;
    const LayerOptions* layer_options = nullptr;
    NodeShape shape;
    std::uint16_t root = 0, set = 0, optimizer = 0; // indices into the space's lists
};
plan::Plan plan_of(const SearchSpace& space, const Candidate& candidate);
ParallelConfigKey parallel_config_of(const Candidate& candidate);
// A total order: smaller bounds first.
bool sooner(const Candidate& a, const Candidate& b);
// Least step seconds of a plan with this bound, less the tested margin.
double least_seconds(double bound);

// Modules that the set of this index recomputes, those inside others included.
unsigned covered(const SearchSpace& space, std::size_t set);
// The set that recomputes what any of the others does, if there is one; by index.
std::optional<std::size_t> largest_of(const SearchSpace& space, const std::vector<std::size_t>& sets);

// The plans and the least memory that a part of the search space came to.
struct Found {
    std::int64_t evaluated = 0; // number of candidates whose bound fits
    Rejections rejected;
    double least_memory = 0.0;          // bytes of the smallest candidate that did not fit; 0 = none
    std::optional<plan::Plan> smallest; // plan of that candidate
    std::vector<Candidate> candidates;

    void note(const plan::Plan& plan, double bytes) {
        if (smallest && bytes >= least_memory) return;
        least_memory = bytes;
        smallest = plan;
    }
};

// Cuts a family into branches with floors (0 when exhaustive), in a fixed order; what cannot be any plan is counted.
std::vector<SearchNode> survey(const SearchSpace& space, const LayerOptions& family, BoundModel& bound_model,
                               bool exhaustive, Found& found);
// Candidates of the branch's roots.
std::int64_t candidates_of(const SearchSpace& space, const SearchNode& branch, std::size_t roots);
// Bounds the branch's plans; those that are below their mapping's limit in the top plans are candidates.
// Deterministic: the result depends on the arguments alone.
Found search_node(const SearchSpace& space, const SearchNode& branch, BoundModel& bound_model, const TopK& top_plans,
                  bool exhaustive);

} // namespace moe::search
