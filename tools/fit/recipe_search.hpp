// A search for what a published run trained, beside the recipe that it was run with.
#pragma once

#include "simulator/published/run_plan.hpp"

#include <optional>
#include <string>
#include <vector>

namespace moe::tools {

struct RecipeSearch {
    std::string run_id;
    double recipe_seconds = 0.0, best_seconds = 0.0; // predicted step seconds; 0 where nothing was predicted
    double recipe_bytes = 0.0, memory_bytes = 0.0;   // predicted for the recipe, and what a GPU has
    std::vector<std::string> differs_in;             // fields in which the best plan is another one
    std::string refused;                             // why no plan was found, or why the recipe has no price

    bool fits() const { return recipe_bytes <= memory_bytes; }
    // The best plan's step over the recipe's.
    double ratio() const { return best_seconds / recipe_seconds; }
    // True where search found a slower plan than the recipe although that fits; playing again rounds at 1e-9.
    bool beaten() const { return fits() && refused.empty() && ratio() > 1.0 + 1e-9; }
};

// The runs with mixtures of experts that have a plan, in the order of their files.
std::vector<published::Run> searched_runs(published::RunPlanner& planner);

// Searches as the verb does by default, without headroom, on `threads` threads; both plans are priced as search prices
// what it lists. The run must have a plan.
RecipeSearch search_recipe(published::RunPlanner& planner, const published::Run& run, int threads);

} // namespace moe::tools
