// Trainings on all GPUs at once beside the prices of their ops.
#include "tools/in_step.hpp"

#include "engine/microbench.hpp"
#include "engine/microbench_grid.hpp"
#include "planner/lower.hpp"
#include "planner/measured.hpp"
#include "simulator/cost/cost.hpp"

#include <algorithm>
#include <numeric>

namespace moe::tools {

namespace {

struct Recorded {
    Plan plan;
    std::vector<std::vector<TimelineRow>> ranks;
};

// All ranks share the model as `sharing` says, and its tokens go to experts over peers' memory.
Recorded record(Point point, const Sharing& sharing, const Hardware& hardware, const std::string& backend) {
    point.sharing = sharing;
    Recorded result{plan_of(point, backend_named(backend)), {}};
    Plan& plan = result.plan;
    plan.hardware = std::make_shared<const Hardware>(hardware);
    plan.dispatcher = Dispatcher::hybridep;
    plan.router.forced = true;
    result.ranks = record_training(plan, backend);
    return result;
}

// Calls visit(op, price, seconds by rank) for every op of the step.
template <class Visit>
void compare(const Recorded& recorded, Visit visit) {
    const Plan& plan = recorded.plan;
    const Stack stack = load_stack(plan.stack, *plan.hardware);
    const Routes routes(*plan.hardware);
    const CostModel model(plan, stack, routes);
    const Program program = lower(plan, 0);
    std::vector<double> seconds(recorded.ranks.size());
    for (std::size_t i = 0; i < recorded.ranks.front().size(); ++i) {
        const TimelineRow& row = recorded.ranks.front()[i];
        const Slot& slot = program.slots[static_cast<std::size_t>(row.slot)];
        const Op& op = program.templates[static_cast<std::size_t>(slot.index)].ops[static_cast<std::size_t>(row.op)];
        for (std::size_t r = 0; r < seconds.size(); ++r) seconds[r] = recorded.ranks[r][i].busy;
        visit(op, model(op, program).device, seconds);
    }
}

// GPUs at the limit of their power hold different clocks, and the others wait for the slowest.
void add_large_products(const Recorded& recorded, MeasuredCall& sum) {
    std::vector<double> took(recorded.ranks.size(), 0.0);
    compare(recorded, [&](const Op& op, double price, const std::vector<double>& seconds) {
        if (!is_large_product(op, price, *recorded.plan.hardware)) return;
        sum.work += price;
        for (std::size_t r = 0; r < took.size(); ++r) took[r] += seconds[r];
    });
    sum.seconds += *std::max_element(took.begin(), took.end());
}

// Ranks do not come at the same time, and what runs beside a collective slows it down. The median: some are hidden by
// what is computed beside them, whatever they take.
double wait_seconds(const Recorded& recorded) {
    std::vector<double> longer;
    compare(recorded, [&](const Op& op, double price, const std::vector<double>& seconds) {
        if (!is_communication(op.kind) || op.stream == Stream::data) return;
        const double mean = std::accumulate(seconds.begin(), seconds.end(), 0.0) / static_cast<double>(seconds.size());
        longer.push_back(mean - price);
    });
    const auto middle = longer.begin() + static_cast<std::ptrdiff_t>(longer.size() / 2);
    std::nth_element(longer.begin(), middle, longer.end());
    return std::max(*middle, 1e-9);
}

} // namespace

void measure_in_step(Hardware& hardware, const std::string& backend, int gpus) {
    const Point wide[] = {{"mixtral", 4096, 32, 8, 128, 12288, 8, 2, 0, 32768, 4096, 2},
                          {"qwen3", 2048, 24, 4, 128, 896, 64, 8, 6144, 65536, 4096, 2}},
                narrow{"qwen3", 1536, 12, 4, 128, 768, 16, 4, 4096, 16384, 2048, 2};
    Hardware alone = hardware; // without what was measured of other groups, or before
    std::erase_if(alone.measured, [](const auto& family) {
        return family.first.rfind(products_key, 0) == 0 || family.first.rfind(waits_key, 0) == 0;
    });
    MeasuredCall large;
    for (const Point& point : wide)
        add_large_products(record(point, {.ranks = gpus, .dp = gpus, .ep = gpus}, alone, backend), large);
    const double wait = wait_seconds(record(narrow, {.ranks = gpus, .tp = gpus, .ep = gpus}, alone, backend));
    hardware.measured[group_key(products_key, gpus)] = {large};
    hardware.measured[group_key(waits_key, gpus)] = {{0.0, wait, {}}};
}

} // namespace moe::tools
