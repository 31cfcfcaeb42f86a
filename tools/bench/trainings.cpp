// The effect of a process's earlier trainings on a later one: the same two layers trained three times over on one GPU,
// and once more in a process of its own. Build target bench-trainings; no arguments.
#include "engine/backends/backends.hpp"
#include "engine/base/run_in_subprocess.hpp"
#include "engine/bench/microbench.hpp"
#include "engine/bench/microbench_grid.hpp"
#include "engine/ops/backend.hpp"
#include "planner/base/error.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/timeline.hpp"
#include "tools/print/table.hpp"

#include <fmt/core.h>

#include <exception>
#include <string>

namespace {

using namespace moe;

std::string row() {
    const plan::Plan plan =
        bench::plan_of({"qwen2", 1024, 8, 8, 128, 704, 32, 4, 2816, 16384, 2048, 1}, backends::backend_named("cuda"));
    const std::vector<program::TimelineRow> ops = bench::record_training(plan, "cuda").front();
    double seconds = 0.0;
    for (const program::TimelineRow& op : ops) seconds += op.busy;
    return fmt::format("{} {}", ops.size(), seconds);
}

void run() {
    tools::Table table({"<training", "ops", "they take", "us of an op"});
    const auto add = [&](const std::string& name, const std::string& said) {
        const double ops = std::stod(said), seconds = std::stod(said.substr(said.find(' ')));
        table.add(
            {name, tools::count_text(ops), tools::seconds_text(seconds), fmt::format("{:.2f}", 1e6 * seconds / ops)});
    };
    for (const char* name : {"in a process of its own", "and another"}) add(name, engine::run_in_subprocess(row));
    for (const char* name : {"first of a process", "second", "third"}) add(name, row());
    fmt::print("{}\n", table.text());
}

} // namespace

int main() {
    try {
        run();
        return 0;
    } catch (const std::exception& error) {
        fmt::print(stderr, "{}\n", error.what());
        return 1;
    }
}
