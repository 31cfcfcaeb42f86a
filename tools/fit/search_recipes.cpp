// Searches what every published MoE run trained and compares the best plan with the recipe that was run.
#include "planner/base/error.hpp"
#include "planner/base/parallel.hpp"
#include "tools/fit/recipe_search.hpp"
#include "tools/print/console.hpp"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

namespace moe::tools {
namespace {

// Rows of a Markdown table, and the recipes that do not fit by name.
void print(const std::vector<RecipeSearch>& rows) {
    double sum = 0.0;
    std::size_t compared = 0, beaten = 0;
    fmt::print("| run | recipe, s | best plan, s | ratio | the best plan differs in |\n|---|---|---|---|---|\n");
    for (const RecipeSearch& row : rows) {
        if (!row.refused.empty() || !row.fits()) continue;
        fmt::print("| {} | {:.4g} | {:.4g} | {:.3f} | {} |\n", row.run_id, row.recipe_seconds, row.best_seconds,
                   row.ratio(), fmt::join(row.differs_in, " "));
        sum += std::log(row.ratio());
        ++compared;
        beaten += row.beaten() ? 1 : 0;
    }
    fmt::print("\n{} recipes compared: the best plan takes {:.3f} of their step on geometric average; {} are predicted "
               "faster than the best plan found.\n",
               compared, std::exp(sum / static_cast<double>(std::max<std::size_t>(compared, 1))), beaten);
    for (const RecipeSearch& row : rows)
        if (row.refused.empty() && !row.fits())
            fmt::print(
                "\n* {} is predicted not to fit: {:.1f} of {:.1f} GiB; the best plan that does takes {:.3f} of its "
                "step",
                row.run_id, row.recipe_bytes / 1073741824.0, row.memory_bytes / 1073741824.0, row.ratio());
    for (const RecipeSearch& row : rows)
        if (!row.refused.empty()) fmt::print("\n* {}: {}", row.run_id, row.refused);
    fmt::print("\n");
}

int run(int argc, char** argv) {
    CLI::App app("searches what every published MoE run trained; prints a Markdown table of the best plans");
    std::string only;
    int threads = 0;
    app.add_option("--only", only, "runs whose names hold this text");
    app.add_option("--threads", threads, "searches at a time; 0: as many as the machine has cores");
    CLI11_PARSE(app, argc, argv);
    published::RunPlanner planner(machine::load_coefficients());
    std::vector<published::Run> runs = searched_runs(planner);
    std::erase_if(runs, [&only](const published::Run& run) { return run.run_id.find(only) == std::string::npos; });
    std::vector<RecipeSearch> rows(runs.size());
    in_parallel(runs.size(), thread_count(threads), [&](std::size_t, std::size_t i) {
        published::RunPlanner own(machine::load_coefficients());
        rows[i] = search_recipe(own, runs[i], 1);
        fmt::print(stderr, "{} {:.3f} {}\n", rows[i].run_id, rows[i].ratio(), rows[i].refused);
    });
    print(rows);
    return std::any_of(rows.begin(), rows.end(), [](const RecipeSearch& row) { return row.beaten(); }) ? 1 : 0;
}

} // namespace
} // namespace moe::tools

int main(int argc, char** argv) {
    try {
        return moe::tools::run(argc, argv);
    } catch (const moe::Error& error) {
        fmt::print(stderr, "search-recipes: {}\n", error.what());
        return 2;
    } catch (const std::exception& error) {
        fmt::print(stderr, "search-recipes: {}\n", error.what());
        return 1;
    }
}
