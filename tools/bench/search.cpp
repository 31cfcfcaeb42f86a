// The speed of search: whole requests on two threads, and single bounds on one. Build target bench-search.
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/model/model.hpp"
#include "simulator/pricing/fast_estimator.hpp"
#include "simulator/published/run_recipe.hpp"
#include "tools/print/table.hpp"
#include "tools/verbs/request.hpp"

#include <fmt/core.h>

#include <chrono>
#include <utility>
#include <vector>

namespace {

using namespace moe;
using Clock = std::chrono::steady_clock;

tools::SearchOptions request(const char* model, const char* hardware, std::int64_t gpus, const char* precision) {
    tools::SearchOptions options;
    options.model = model;
    options.hardware = hardware;
    options.gpus = gpus;
    options.gbs = 8 * gpus;
    options.seq = 4096;
    options.precisions = precision;
    return options;
}

// Bounds per second of one thread: the best plan's layers with several sets of recomputed modules in its cut.
double bounds_per_second(search::Estimator& estimator, const plan::Plan& plan, const stack::Stack& stack) {
    const std::unique_ptr<search::BoundModel> bound_model = estimator.bound_model();
    std::vector<int> layers;
    for (const unsigned set : stack.recompute_sets) {
        plan::Plan other = plan;
        other.recompute = published::applicable_recompute(set, *plan.model);
        layers.push_back(bound_model->layer_costs(other));
    }
    const int stages = bound_model->stage_split(plan);
    double checksum = 0.0;
    std::int64_t bounds = 0;
    const Clock::time_point start = Clock::now();
    for (double seconds = 0.0; seconds < 1.0; seconds = std::chrono::duration<double>(Clock::now() - start).count())
        for (int i = 0; i < 1000; ++i, ++bounds)
            checksum += bound_model->bound(layers[static_cast<std::size_t>(i) % layers.size()], stages).step_seconds;
    if (!(checksum > 0.0)) fail("bounds of {} add up to {}", plan.model->name, checksum);
    return static_cast<double>(bounds) / std::chrono::duration<double>(Clock::now() - start).count();
}

void measure(const tools::SearchOptions& options, tools::Table& table) {
    tools::Request request = tools::request_of(options);
    request.search.threads = 2;
    pricing::FastEstimator estimator(request.search.base.hardware, request.stack);
    const search::SearchResult result = search::search(request.search, request.stack, estimator);
    std::int64_t weighed = result.evaluated;
    for (const auto& [reason, count] : result.pruned) weighed += count;
    const auto& [plan, best] = result.plans.front();
    const auto count = [](auto number) { return tools::count_text(static_cast<double>(number)); };
    table.add({fmt::format("{}, {} {}, {}", options.model, options.gpus, options.hardware, options.precisions),
               count(weighed), count(result.evaluated), count(result.priced), tools::seconds_text(result.seconds),
               count(static_cast<double>(weighed) / result.seconds / 2.0),
               count(bounds_per_second(estimator, plan, request.stack)), fmt::format("{:.0f}", best.tflops_per_gpu)});
}

} // namespace

int main() try {
    tools::Table table({"<request", "candidates", "evaluated", "priced", "wall, 2 threads", "weighed/s/core",
                        "bounds/s/core", "best TFLOPS/GPU"});
    for (const tools::SearchOptions& options :
         {request("DeepSeek-V3", "h100", 1024, "fp8-blockwise"), request("DeepSeek-V3", "h100", 1024, "bf16"),
          request("DeepSeek-V3", "gb200-nvl72", 256, "mxfp8"), request("Qwen3-235B-A22B", "gb200-nvl72", 256, "mxfp8"),
          request("DeepSeek-V3", "h100", 10240, "fp8-blockwise")})
        measure(options, table);
    fmt::print("{}\n", table.text());
} catch (const Error& error) {
    fmt::print(stderr, "bench-search: {}\n", error.what());
    return static_cast<int>(error.fault());
}
