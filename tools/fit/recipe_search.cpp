// Runs the search of each recipe's request.
#include "tools/fit/recipe_search.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/plan/plan_fields.hpp"
#include "planner/search/refined_search.hpp"
#include "simulator/pricing/skewed_estimator.hpp"
#include "simulator/published/recipe_request.hpp"

namespace moe::tools {

std::vector<published::Run> searched_runs(published::RunPlanner& planner) {
    std::vector<published::Run> runs;
    for (const published::Run& run : published::load_runs(profiles_folder() + "/runs")) {
        const published::PlannedRun planned = planner.plan(run);
        if (planned.skipped.empty() && planned.kind != "dense") runs.push_back(run);
    }
    return runs;
}

RecipeSearch search_recipe(published::RunPlanner& planner, const published::Run& run, int threads) {
    const published::PlannedRun planned = planner.plan(run);
    const plan::Plan& recipe = planned.plan;
    const stack::Stack& stack = planner.stack(recipe);
    // What runs nearby correct is the same for all plans of a request.
    pricing::SkewedEstimator estimator(recipe.hardware, stack);
    search::SearchRequest request = published::request_of(recipe);
    request.threads = threads;
    RecipeSearch result;
    result.run_id = run.run_id;
    result.memory_bytes = recipe.hardware->memory_bytes;
    try {
        result.recipe_bytes = estimator.memory_bytes(recipe);
        result.recipe_seconds = estimator.play(recipe).step_seconds;
        const search::SearchResult found = search::refined_search(request, stack, estimator);
        const auto& [best, estimate] = found.plans.front();
        result.best_seconds = estimate.step_seconds;
        for (const plan::FieldChange& change : plan::differences(recipe, best))
            result.differs_in.push_back(change.field);
    } catch (const Error& error) {
        result.refused = error.what();
    }
    return result;
}

} // namespace moe::tools
