// Searches for what published runs trained find no slower plan than their recipes.
#include "tools/fit/recipe_search.hpp"

#include "tests/support/draws.hpp"

#include <doctest/doctest.h>

#include <set>
#include <string>
#include <vector>

using namespace moe;

// One row each of a model, a machine and a stack; `search-recipes` runs all of them.
TEST_CASE("the best plan found for a published run is no slower than its recipe") {
    const std::vector<std::string> drawn =
        thinned(std::vector<std::string>{"MPF-2504.14960-Mx22-H100-BF16-128g-11", "PR5728-Q3-30B-GB200-BF16-16g",
                                         "MB-26.06-N3Nano-H100-FP8CS-16g", "MB-25.09-DSV3-H100-FP8CS-1024g"});
    const std::set<std::string> names(drawn.begin(), drawn.end());
    published::RunPlanner planner(machine::load_coefficients());
    std::size_t found = 0;
    for (const published::Run& run : tools::searched_runs(planner)) {
        if (!names.contains(run.run_id)) continue;
        ++found;
        const tools::RecipeSearch search = tools::search_recipe(planner, run, 0);
        CAPTURE(run.run_id);
        CAPTURE(search.refused);
        CHECK(search.refused.empty());
        CHECK(search.fits());
        CHECK_FALSE(search.beaten());
        CHECK(search.ratio() > 0.3);
    }
    CHECK(found == names.size());
}

// The only recipe that `search-recipes` lists as not fitting: 31.6 billion parameters on eight H100, 2.5 GiB too much.
TEST_CASE("a recipe that is predicted not to fit is told, and what fits is found") {
    published::RunPlanner planner(machine::load_coefficients());
    for (const published::Run& run : tools::searched_runs(planner)) {
        if (run.run_id != "AM-AutoModel-N3Nano-H100-BF16-8g") continue;
        const tools::RecipeSearch search = tools::search_recipe(planner, run, 0);
        CHECK_FALSE(search.fits());
        CHECK_FALSE(search.beaten());
        CHECK(search.recipe_bytes > search.memory_bytes);
        CHECK(search.best_seconds > 0.0);
        return;
    }
    FAIL("no such row");
}
